"""Choice of the blocks of a model: members of module lists that run and keep the shape.

Members of the outermost lists are the blocks of most models. If one of them changes the shape, as
the stages of Swin and ConvNeXt do, the list is one of stages: blocks are the members of the lists
inside, if each receives what the one before it returned. (Experts in a list do not.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves


class BlockCall(NamedTuple):
    """One call of a block.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: The value that the block returned.
        input_numbers: Numbers of the tensors among the arguments.
        output_numbers: Numbers of the tensors in the output.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    input_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]


Calls = Mapping[str, list[BlockCall]]


def list_members(model: nn.Module) -> set[str]:
    """Return the names of all members of ``nn.ModuleList``."""
    return {name for members in _lists_inside(model, "", False) for name in members}


def select_blocks(model: nn.Module, calls: Calls, reshaping: Iterable[str]) -> list[str]:
    """Return the blocks of a model.

    Args:
        model: The model.
        calls: Member of a list -> its calls that keep the shape.
        reshaping: Members with calls that change it.
    """
    passing_on = _find_reshaping(model, calls)
    calls = {name: made for name, made in calls.items() if name not in passing_on}
    changing = {*reshaping, *passing_on}
    blocks: list[str] = []
    for members in _lists_inside(model, ""):
        blocks += _select(model, members, calls, changing)
    chosen = set(blocks)
    return [name for name in calls if name in chosen]  # in the order of execution


def is_inside(name: str, block: str) -> bool:
    """Whether a module is a block or lies in it."""
    return f"{name}.".startswith(f"{block}.")


def enclosing_block(member: str, blocks: Iterable[str]) -> str:
    """Return the block that a member of a list is or lies in, or an empty string."""
    return next((block for block in blocks if is_inside(member, block)), "")


def _find_reshaping(model: nn.Module, calls: Calls) -> set[str]:
    """Return the members of lists that pass a tensor of another shape on to the next member.

    Example: a stage of Swin V2 returns its outputs after and before they are made smaller. The
    second tensor has the shape of the inputs, but the next stage receives the first.
    """
    return {
        one
        for members in _lists_inside(model, "", False)
        for one, other in pairwise(name for name in members if name in calls)
        if _passes_other_shape(calls[one][-1], calls[other][0])
    }


def _passes_other_shape(call: BlockCall, following: BlockCall) -> bool:
    received = following.input_numbers[:1]
    inputs, outputs = _tensors((call.args, call.kwargs)), _tensors(call.output)
    return any(
        number in received and tensor.shape != inputs[0].shape
        for number, tensor in zip(call.output_numbers, outputs, strict=True)
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    plain = dict(tree) if isinstance(tree, dict) else tree  # as ``trace`` numbers them
    return [leaf for leaf in tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


def _select(model: nn.Module, members: list[str], calls: Calls, changing: set[str]) -> list[str]:
    are_stages = not changing.isdisjoint(members)
    blocks: list[str] = []
    for name in members:
        inner: list[str] = []
        for inside in _lists_inside(model, name) if are_stages else ():
            if _are_chained(inside, calls):
                inner += _select(model, inside, calls, changing)
        blocks += inner or ([name] if name in calls else [])
    return blocks


def _are_chained(members: list[str], calls: Calls) -> bool:
    """Whether members ran once each, and each received what the one before it returned."""
    runs = [calls.get(name, []) for name in members]
    return all(len(run) == 1 for run in runs) and all(
        one[0].output_numbers[:1] == other[0].input_numbers[:1] for one, other in pairwise(runs)
    )


def _lists_inside(model: nn.Module, name: str, outermost: bool = True) -> list[list[str]]:
    """Return the members of each module list below a module.

    Example: ``layers`` and ``layers.0.experts``; only the members of ``layers`` if ``outermost``.
    """
    prefix = f"{name}." if name else ""
    modules = model.get_submodule(name).named_modules()
    lists = [prefix + n for n, m in modules if n and _is_list(m)]
    return [
        [f"{one}.{key}" for key, _ in model.get_submodule(one).named_children()]
        for one in lists
        if not (outermost and any(one.startswith(f"{other}.") for other in lists))
    ]


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules; parametrizations of a weight are none."""
    return isinstance(module, nn.ModuleList) and not isinstance(module, ParametrizationList)
