"""Runs and models under a bound of memory, for which work is left to torch.

Numba and its kernels take memory that a bound may not have. A kernel gives the bits of torch, so
results do not depend on this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

_BOUNDED: WeakSet[object] = WeakSet()  # those that are alive


class _Run:
    """Stands for a run among the models."""


@contextmanager
def spare_memory() -> Iterator[None]:
    """Leave work to torch during a run, unless numba is in the memory of the process already."""
    run = _Run()
    spare_memory_of(run)
    try:
        yield
    finally:
        _BOUNDED.discard(run)


def spare_memory_of(model: object) -> None:
    """Leave work to torch as long as a model is in memory, unless numba is there already."""
    _BOUNDED.add(model)


def spares_memory() -> bool:
    """Whether a run or a model leaves work to torch now."""
    return len(_BOUNDED) > 0 and "numba" not in sys.modules
