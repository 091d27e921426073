"""Imports of the libraries that models need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection while modules are imported, a sixth of whose time it takes.

    The collector goes through all objects again and again, and those of modules stay. It is also a
    decorator of functions that import much and hold no large values.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
