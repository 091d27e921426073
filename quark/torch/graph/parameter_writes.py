"""The one function through which algorithms change the values of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

Recorder = Callable[[nn.Parameter], None]

_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def record_writes(record: Recorder) -> Iterator[None]:
    """Call a function before each change of a parameter inside the context.

    Args:
        record: Takes the parameter, which still has its old values.
    """
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)


@torch.no_grad()
def write_(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the values of a parameter in place, in its own type and on its own device."""
    record = _recorder.get()
    if record is not None:
        record(parameter)
    parameter.data.copy_(values)
