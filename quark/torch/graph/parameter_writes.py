"""The one function through which algorithms change the values of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

Recorder = Callable[[nn.Parameter], None]

_recorders: ContextVar[tuple[Recorder, ...]] = ContextVar("recorders", default=())


@contextmanager
def record_writes(record: Recorder) -> Iterator[None]:
    """Call a function before each change of a parameter inside the context.

    Args:
        record: Takes the parameter, which still has its old values.
    """
    token = _recorders.set((*_recorders.get(), record))
    try:
        yield
    finally:
        _recorders.reset(token)


@torch.no_grad()
def write_(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the values of a parameter in place, in its own type and on its own device."""
    announce_write(parameter)
    parameter.data.copy_(values)


def announce_write(parameter: nn.Parameter) -> None:
    """Let the recorders know that the values of a parameter will change."""
    for record in _recorders.get():
        record(parameter)
