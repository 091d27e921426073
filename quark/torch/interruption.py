"""Interrupts of the user (SIGINT, Ctrl-C), which must end the work also where Python loses one.

Python drops an exception that is raised while an object is freed: by a finalizer, the callback of a
weak reference, or a generator that is closed. If the handler of the signal happens to run there,
its ``KeyboardInterrupt`` is lost, and the work would go on to its end.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

_received = threading.Event()


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Remember an interrupt in this context until ``raise_interrupt`` is called.

    Nothing changes in other threads than the main one, or if the signal has another handler than
    that of Python.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler is not signal.default_int_handler:
        yield
        return
    hook = sys.unraisablehook
    signal.signal(signal.SIGINT, _remember)
    sys.unraisablehook = partial(_tell_lost, hook)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
        _received.clear()


def raise_interrupt() -> None:
    """Raise an interrupt that was received, unless it is on its way already.

    Steps of long work call this, and so does a writer before its output takes its place.

    Raises:
        KeyboardInterrupt: An interrupt was received within ``kept_interrupts``.
    """
    if _received.is_set() and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        _received.clear()
        raise KeyboardInterrupt


def _remember(number: int, frame: FrameType | None) -> None:
    _received.set()
    signal.default_int_handler(number, frame)


def _tell_lost(hook: Callable[[Any], object], lost: Any) -> None:
    """Tell of an exception that Python loses, by a hook of ``sys``, unless it is an interrupt."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        hook(lost)
