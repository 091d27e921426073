"""Layers that share an input: modules that read the same tensor.

Software that serves a model fuses such layers into one product, and they share the statistics of
their input. They are found by running the model; names of modules play no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_Key = tuple[Any, ...]


class SharedInputs:
    """Records which modules receive the same tensor."""

    def __init__(self) -> None:
        self._readers: dict[_Key, dict[str, None]] = defaultdict(dict)
        self._inputs: list[torch.Tensor] = []

    def add(self, name: str, x: torch.Tensor) -> None:
        """Record that a module receives a tensor."""
        self._inputs.append(x)  # its memory is not reused, so an address means one tensor
        self._readers[_identity(x)][name] = None

    def release(self) -> None:
        """Release the inputs; nothing can be recorded after."""
        self._inputs.clear()

    def groups(self, least: int = 2) -> tuple[tuple[str, ...], ...]:
        """Return the names of modules that read the same tensor, in the order of execution.

        Args:
            least: Least number of modules of a group.
        """
        return tuple(tuple(names) for names in self._readers.values() if len(names) >= least)


@contextmanager
def record_shared_inputs(model: nn.Module) -> Iterator[SharedInputs]:
    """Record the inputs of all modules with a matrix as weight, while the context lasts.

    Args:
        model: Model to watch. It is not changed.
    """
    shared = SharedInputs()

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                shared.add(name, args[0])

        return hook

    weights = {n: m._parameters.get("weight") for n, m in model.named_modules()}
    names = [name for name, weight in weights.items() if weight is not None and weight.dim() == 2]
    handles = [model.get_submodule(n).register_forward_pre_hook(watch(n)) for n in names]
    try:
        yield shared
    finally:
        for handle in handles:
            handle.remove()
        shared.release()


def same_input_groups(
    model: nn.Module, run: Callable[[], object], single: bool = False
) -> list[list[str]]:
    """Return the linear layers of one parent that receive the same tensor.

    Args:
        model: Model to run. It is not changed.
        run: Runs data through the model once. A layer that no data reaches is in no group.
        single: Whether to return groups of one layer too, which alone reads its input.

    Returns:
        Groups of full names, of two or more unless ``single``, such as the query, key and value
        projections of each attention block, in the order of execution.
    """
    with record_shared_inputs(model) as shared, torch.no_grad():
        run()
    result: list[list[str]] = []
    least = 1 if single else 2
    for names in shared.groups(least):
        by_parent: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if isinstance(model.get_submodule(name), nn.Linear):
                by_parent[name.rpartition(".")[0]].append(name)
        result += [group for group in by_parent.values() if len(group) >= least]
    return result


def first_readers(names: Iterable[str], groups: Iterable[Collection[str]]) -> dict[str, str]:
    """Map each layer to the first of the given layers that reads the same tensor.

    Args:
        names: The layers.
        groups: Names of modules that share an input.
    """
    names = list(names)
    group_of: dict[str, Collection[str]] = {}
    for group in groups:
        for name in group:
            group_of.setdefault(name, group)
    return {n: next(m for m in names if m == n or m in group_of.get(n, ())) for n in names}


def _identity(x: torch.Tensor) -> _Key:
    """Return a key that two tensors share if they hold the same elements of the same memory.

    A contiguous tensor keeps its key under views with the same last axis: (2, 8, 64) and (16, 64)
    are one input of 16 tokens. Writing in place changes the version, and so the key.
    """
    version = 0 if x.is_inference() else x._version
    layout = x.numel() if x.is_contiguous() else (x.shape, x.stride())
    return x.device, x.data_ptr(), x.dtype, version, x.shape[-1:], layout
