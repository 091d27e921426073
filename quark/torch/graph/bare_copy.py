"""Copies of models without hooks and without what reads their values in parts, for trial runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from quark.torch.graph.residency import residency_of

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def bare_copy(model: nn.Module, tensors: Mapping[int, Any]) -> nn.Module:
    """Return a copy of a model that runs no hooks and loads no values.

    Args:
        model: The model. It is not changed.
        tensors: Identifiers of tensors -> what takes their place in the copy; others are copied.
    """
    given = dict(tensors)
    given |= {id(vars(m)[name]): OrderedDict() for m in model.modules() for name in _HOOKS}
    given[id(residency_of(model))] = None
    copied = deepcopy(model, given)
    for module in copied.modules():
        if vars(module).pop("_old_forward", None) is not None:  # a forward that loads values first
            del module.forward
    return copied
