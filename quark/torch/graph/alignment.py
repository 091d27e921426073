"""Addresses of parameters: products round by the address of a matrix, so all begin at one kind.

A parameter that is read from a mapped file begins where the file has it. Some products of one row
or column begin their sums elsewhere then, and the last bits of their results differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from quark.torch.graph.residency import residency_of

BOUNDARY = 64  # bytes: where torch allocates tensors on the CPU


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor begins where torch would allocate it. On devices, all do."""
    return x.device.type != "cpu" or x.layout is not torch.strided or x.data_ptr() % BOUNDARY == 0


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that begins at a multiple of 64 bytes: itself, or a copy with its strides."""
    if is_aligned(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


@torch.no_grad()
def align_parameters(model: nn.Module) -> None:
    """Let the parameters of a model in memory begin at multiples of 64 bytes.

    They stay the same objects with the same values. Parameters that share memory with another
    parameter or buffer stay where they are. A model larger than memory is aligned as it is read.

    Args:
        model: The model.
    """
    if residency_of(model) is not None:
        return
    shared = _sharing_memory(chain(model.parameters(), model.buffers()))
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter and id(parameter) not in shared:
            parameter.data = aligned(parameter.data)


def _sharing_memory(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of tensors on the CPU whose addresses overlap those of another one."""
    spans = sorted(
        ((*span, key) for key, x in {id(x): x for x in tensors}.items() for span in _span(x)),
    )
    shared: set[int] = set()
    end, last = 0, 0  # of the tensor that reaches furthest so far
    for start, stop, key in spans:
        if start < end:
            shared |= {key, last}
        if stop > end:
            end, last = stop, key
    return shared


def _span(x: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the first address of a tensor on the CPU and the one after its last byte."""
    if x.device.type == "cpu" and x.layout is torch.strided and x.numel():
        steps = zip(x.shape, x.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        yield x.data_ptr(), x.data_ptr() + extent * x.itemsize
