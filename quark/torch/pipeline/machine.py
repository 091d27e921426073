"""Memory that this process takes, and a probe of the speed of this machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import torch

from quark.torch.graph.float_products import float_products
from quark.torch.pipeline.requirements import Machine

_SIDE = 512  # rows and columns of the matrices of the probe
_PIECE = 8 << 20  # bytes that are read and written at once


def peak_memory() -> int | None:
    """Return the most bytes of main memory that this process has taken; None if unknown."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux: getrusage counts the process that started this one too
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # Windows
    if peak is not None:
        return int(peak)
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(most) * (1 if sys.platform == "darwin" else 1024)


def probe(
    files: Iterable[Path],
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seconds: float = 0.25,
) -> Machine:
    """Measure the speed of this machine.

    Args:
        files: Files of the model, which are read.
        directory: A directory of the disk that will be written.
        dtype: Type of the model.
        device: Where it runs.
        seconds: Time of each of four measurements.
    """
    return Machine(
        flops=_products(dtype, torch.device(device), seconds),
        solver_flops=_products(torch.float32, torch.device(device), seconds),
        read=_reads(files, seconds),
        write=_writes(directory, seconds),
    )


def _products(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Return products and sums per second of matrix products, where nothing else is at work."""
    a, b = (torch.ones(_SIDE, _SIDE, dtype=dtype, device=device) for _ in range(2))
    with float_products():
        a @ b
        return _best_rate(lambda: float((a @ b)[0, 0]) * 0 + 2.0 * _SIDE**3, seconds)


def _reads(files: Iterable[Path], seconds: float) -> float:
    """Return bytes per second that are read from files; those in the cache count as read."""
    pieces = (piece for file in files for piece in _pieces(file))
    return _rate(lambda: float(next(pieces, 0)), seconds)


def _pieces(file: Path) -> Iterable[int]:
    with file.open("rb", buffering=0) as opened:
        while piece := opened.read(_PIECE):
            yield len(piece)


def _writes(directory: Path, seconds: float) -> float:
    """Return bytes per second that reach the disk."""
    piece = bytes(_PIECE)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:

        def write() -> float:
            try:
                written = file.write(piece)
                os.fsync(file.fileno())
            except OSError as error:  # which has no name
                raise OSError(error.errno, error.strerror, str(directory)) from error
            return float(written or 0)

        return _rate(write, seconds)


def _best_rate(step: Callable[[], float], seconds: float) -> float:
    """Return how much the fastest of several steps does per second.

    Other work on the machine interrupts most steps of a short probe, or none, by chance.
    """
    start = time.perf_counter()
    best, end = 0.0, start
    while end - start < seconds:
        begin = time.perf_counter()
        amount = step()
        end = time.perf_counter()
        best = max(best, amount / max(end - begin, 1e-9))
    return best


def _rate(step: Callable[[], float], seconds: float) -> float:
    """Return how much a step does per second, repeated for a while or until it does nothing."""
    start, done = time.perf_counter(), 0.0
    while time.perf_counter() - start < seconds:
        amount = step()
        done += amount
        if not amount:
            break
    elapsed = time.perf_counter() - start
    return done / elapsed if done else float("inf")
