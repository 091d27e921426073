"""Targets of the groups of compressed-tensors: names of layers, and expressions for experts.

Transformers merges experts, and takes the first group that has an expression with ``experts`` for
all of them. vLLM looks for names such as ``experts.0.gate_proj``, whatever the model calls them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_EXPERT = re.compile(r"(.*experts)\.\d+\.[^.]+")


def stack_of(name: str) -> str:
    """Return the name of the experts around a layer: ``mlp.experts`` for ``mlp.experts.3.w1``.

    It is "" for other layers.
    """
    found = _EXPERT.fullmatch(name)
    return found[1] if found else ""


def targets_of(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the targets of each group.

    Experts of a stack that are all in one group are an expression, other layers their names.

    Args:
        groups: Names of the layers of each group.
    """
    stacks = Counter(stack for names in groups for stack in {stack_of(name) for name in names})
    return [
        list(
            dict.fromkeys(
                f"re:^{re.escape(stack)}\\..*$"
                if (stack := stack_of(name)) and stacks[stack] == 1
                else name
                for name in names
            )
        )
        for names in groups
    ]
