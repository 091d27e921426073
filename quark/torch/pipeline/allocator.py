"""Free memory of the allocator of C, returned to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

# Options of mallopt, in bytes: larger blocks are mapped by themselves; more at the end is returned.
# The last one is the number of blocks that may be mapped by themselves.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MMAP_COUNT = -3, -1, -4
_HOLE, _END = 16 << 20, 32 << 20


def return_free_memory() -> None:
    """Return memory that is free inside of the heap to the system, where glibc manages it.

    Tensors that come and go leave holes between smaller ones that stay. Without this, the process
    grows with every block of a model, though no more is in use.
    """
    trim = _find("malloc_trim")
    if trim is not None:
        trim(0)


def keep_holes_small() -> None:
    """Let large tensors lie outside of the heap from now on, where glibc manages it.

    glibc puts tensors of up to 32 MiB into the heap once one of that size was freed. When they are
    freed, smaller tensors between them keep the memory from being returned.
    """
    set_option = _find("mallopt")
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _HOLE)
        set_option(_TRIM_THRESHOLD, _END)


@contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Keep the memory of freed tensors for the next ones while the context lasts, under glibc.

    The system clears memory that it gives, page by page. For tensors that are written once, that
    takes as long as the work on them. Afterwards free memory is returned, and tensors of more than
    16 MiB lie outside of the heap, as after ``keep_holes_small``.
    """
    set_option = _find("mallopt")
    if set_option is None:
        yield
        return
    set_option(_MMAP_COUNT, 0)
    set_option(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        set_option(_MMAP_COUNT, 1 << 16)  # as glibc begins
        keep_holes_small()
        return_free_memory()


@cache
def _find(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):  # another system, or another library of C
        return None
