"""Progress: a bar on a terminal, lines in the log elsewhere."""

import io
import logging
import time

import pytest

from quark.torch import progress
from quark.torch.progress import bytes_progress, elapsed_progress, show_progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.fixture
def lines(caplog):
    """Function that returns the lines of the log so far."""
    caplog.set_level(logging.INFO, "quark")
    return lambda: caplog.messages


def test_a_line_every_half_minute(clock, lines):
    seen = []
    for item in show_progress(range(8), "blocks"):
        seen.append(item)
        clock.now += 20
    assert seen == list(range(8))
    assert lines() == [
        "blocks: 2 of 8, 2 min left",
        "blocks: 4 of 8, 80 s left",
        "blocks: 6 of 8, 40 s left",
        "blocks: 8 of 8, 0 s left",
    ]


def test_short_work_is_silent(clock, lines):
    for _ in show_progress([1, 2, 3], "blocks"):
        clock.now += 9
    assert lines() == []


def test_an_unknown_number(clock, lines):
    for _ in show_progress(iter("abc"), "files"):
        clock.now += 31
    assert lines() == ["files: 1 done", "files: 2 done", "files: 3 done"]


def test_bytes(clock, lines):
    with bytes_progress(4_000_000, "digests") as add:
        for _ in range(4):
            clock.now += 31
            add(1_000_000)
    assert lines()[0] == "digests: 25%, 93 s left"
    assert lines()[-1] == "digests: 100%, 0 s left"


def test_a_bar_on_a_terminal(monkeypatch, lines):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "DELAY", 0)
    assert list(show_progress([1, 2, 3], "blocks")) == [1, 2, 3]
    with bytes_progress(10, "digests") as add:
        add(10)
    assert "blocks" in screen.getvalue()
    assert "digests" in screen.getvalue()
    assert lines() == []


def test_work_in_one_piece_tells_its_time(lines, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with pytest.raises(KeyError, match="kept"), elapsed_progress("tracing"):
        wait_until(lambda: len(lines()) >= 2)
        raise KeyError("kept")
    count = len(lines())
    assert set(lines()) == {"tracing: 0 s so far"}
    time.sleep(0.05)
    assert len(lines()) == count  # the thread has ended


def test_short_work_in_one_piece_is_silent(lines):
    with elapsed_progress("tracing"):
        pass
    assert lines() == []


def test_work_in_one_piece_on_a_terminal(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(progress.sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", 0.01)
    with elapsed_progress("tracing"):
        wait_until(lambda: "tracing: 00:00" in stream.getvalue())


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()
