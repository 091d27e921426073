"""Free memory of the allocator of C, returned to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def return_free_memory() -> None:
    """Return memory that is free inside of the heap to the system, where glibc manages it.

    Tensors that come and go leave holes between smaller ones that stay. Without this, the process
    grows with every block of a model, though no more is in use.
    """
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another system, or another library of C
        return None
