"""Progress of long work: a bar on a terminal, a line in the log every half minute elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quark.torch.interruption import raise_interrupt

logger = logging.getLogger(__name__)

DELAY = 1.0  # seconds after which a bar appears
INTERVAL = 30.0  # seconds from one line of the log to the next
_BYTES = {"unit": "B", "unit_scale": True}


def show_progress(items: Any, title: str, is_shown: bool = True) -> Iterator[Any]:
    """Yield the same items, and show how many of them are done. An interrupt ends the iteration.

    A terminal shows a bar after a second. Elsewhere, such as in the log file of a job, a line of
    level info tells every half minute how much is done, and how much time is left.

    Args:
        items: What to iterate over; its length is used if it has one.
        title: What is done.
        is_shown: Whether anything is shown; in one of several processes.

    Raises:
        KeyboardInterrupt: The user interrupted an earlier step; see ``interruption``.
    """
    for item in _shown(items, title) if is_shown else items:
        raise_interrupt()
        yield item


def _shown(items: Any, title: str) -> Any:
    if _is_on_terminal():
        from tqdm import tqdm

        return tqdm(items, desc=title, delay=DELAY, leave=False)
    return _logged(items, title)


@contextmanager
def bytes_progress(total: int, title: str) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of bytes that were done, and shows their sum.

    Args:
        total: Number of all bytes.
        title: What is done.
    """
    if _is_on_terminal():
        from tqdm import tqdm

        with tqdm(total=total, desc=title, delay=DELAY, leave=False, **_BYTES) as bar:
            yield bar.update
    else:
        yield _Lines(title, total).add


@contextmanager
def elapsed_progress(title: str) -> Iterator[None]:
    """Show the time that work in one piece, of another library, has taken so far.

    Args:
        title: What is done.
    """
    bar: Any = None
    if _is_on_terminal():
        from tqdm import tqdm

        bar = tqdm(desc=title, delay=DELAY, leave=False, bar_format="{desc}: {elapsed}")
    start, is_done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_done.wait(INTERVAL if bar is None else DELAY):
            if bar is not None:
                bar.refresh()
            else:
                logger.info("%s: %.0f s so far", title, time.monotonic() - start)

    thread = threading.Thread(target=tell, name="quark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        if bar is not None:
            bar.close()


def _is_on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _logged(items: Any, title: str) -> Iterator[Any]:
    lines = _Lines(title, _length(items))
    for item in items:
        yield item
        lines.add(1)


def _length(items: Any) -> int | None:
    try:
        return len(items)
    except TypeError:
        return None


class _Lines:
    """Writes lines about the progress of some work to the log.

    Args:
        title: What is done.
        total: Number of all parts; None if it is not known.
    """

    def __init__(self, title: str, total: int | None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._start = self._last = time.monotonic()

    def add(self, parts: int) -> None:
        """Add parts that were done."""
        self._done += parts
        now = time.monotonic()
        if now - self._last >= INTERVAL:
            self._last = now
            logger.info("%s: %s", self._title, self._describe(now - self._start))

    def _describe(self, seconds: float) -> str:
        """Return what is done: ``12 of 32, 40 min left``."""
        if not self._total:
            return f"{self._done} done"
        share = min(self._done / self._total, 1.0)
        left = seconds * (1 - share) / share
        words = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        if self._total >= 10**6:  # bytes
            return f"{share:.0%}, {words} left"
        return f"{self._done} of {self._total}, {words} left"
