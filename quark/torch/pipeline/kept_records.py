"""The log of one thread, kept from the handlers: of several workers the first one logs for all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("quark")

Records = list[tuple[int, str]]  # level and text

_lock = threading.Lock()


@contextmanager
def kept_records(keeps: bool = True) -> Iterator[Records]:
    """Keep what this thread logs inside the context, instead of passing it to the handlers.

    It holds for the log of this package and for the handlers that are there when the context opens.
    Contexts may be nested: the innermost one keeps a record.

    Args:
        keeps: Whether records are kept; otherwise the handlers get them, and the list stays empty.
    """
    keeper = _Keeper()
    handlers = list(_handlers()) if keeps else []
    _change_filters(handlers, lambda filters: [keeper, *filters])
    try:
        yield keeper.records
    finally:
        _change_filters(handlers, lambda filters: [f for f in filters if f is not keeper])


def _handlers() -> Iterator[logging.Handler]:
    """Iterate over the handlers that records of this package reach."""
    place: logging.Logger | None = logger
    while place is not None:
        yield from place.handlers
        place = place.parent if place.propagate else None


def _change_filters(
    handlers: list[logging.Handler], change: Callable[[list[Any]], list[Any]]
) -> None:
    """Give handlers new lists of filters: another thread may iterate over the old ones."""
    with _lock:
        for handler in handlers:
            handler.filters = change(handler.filters)


class _Keeper(logging.Filter):
    """Takes the records of one thread."""

    def __init__(self) -> None:
        super().__init__(logger.name)
        self._thread, self._last = threading.get_ident(), logging.makeLogRecord({})
        self.records: Records = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a handler gets a record."""
        if record.thread != self._thread or not super().filter(record):
            return True
        if record is not self._last:  # several handlers ask
            self.records.append((record.levelno, record.getMessage()))
        self._last = record
        return False
