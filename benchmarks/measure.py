"""Shared by benchmarks: clock and memory meter, rounds, fresh processes, tables."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

MIB = 1 << 20
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished child processes."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class Meter:
    """Measures what runs inside ``with``: ``cpu`` in seconds, ``added`` peak memory in MiB.

    ``added`` is the high-water mark of resident memory above the level at the start. Where the
    mark cannot be reset it is how far the old mark was exceeded, a lower bound; where there is
    none it is None.
    """

    cpu: float
    added: float | None

    def __enter__(self) -> Meter:
        gc.collect()
        _return_freed_memory()
        self._start = _reset_peak()
        self._cpu = cpu_seconds()
        return self

    def __exit__(self, *exception: object) -> None:
        self.cpu = cpu_seconds() - self._cpu
        peak = peak_memory()
        known = peak is not None and self._start is not None
        self.added = (peak - self._start) / MIB if known else None


def _return_freed_memory() -> None:
    """Give freed memory back, so that using it again counts as added (glibc only)."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _reset_peak() -> int | None:
    """Start a new high-water mark and return the level above which memory is added, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak_memory()


def peak_memory() -> int | None:
    """Return the high-water mark of resident memory in bytes; None where the system has none."""
    try:
        return _status("VmHWM")
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def alternate(
    work: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = cpu_seconds,
) -> dict[str, float]:
    """Run A B … A B … after a round to warm up; return the median seconds of each by a clock."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds + 1):
        for name, run in work.items():
            start = clock()
            run()
            if i:
                seconds[name].append(clock() - start)
    return {name: median(values) for name, values in seconds.items()}


def in_fresh_process(
    script: str, *arguments: Any, python: str | Path = sys.executable, device: str = "cpu"
) -> Any:
    """Run a script of this folder on one thread and return the JSON of its last line.

    GPUs are hidden from it, unless ``device`` is one.

    Raises:
        RuntimeError: It failed; the end of its output is in the message.
    """
    command = [str(python), str(Path(__file__).parent / script), *map(json.dumps, arguments)]
    environment = os.environ | ONE_THREAD
    if device != "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    if str(python) != sys.executable:
        environment.pop("PYTHONPATH", None)  # packages of this environment, such as this one
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def say(text: str) -> None:
    """Print progress to the standard error stream."""
    print(text, file=sys.stderr, flush=True)


def middle(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over several runs of the same thing."""
    rows = list(rows)
    return {
        key: median(row[key] for row in rows) if isinstance(value, (int, float)) else value
        for key, value in rows[0].items()
    }


def markdown(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table: text to the left, figures to the right, None as a dash."""
    body = [[_cell(value) for value in row] for row in rows]
    figures = [all(_is_figure(row[i]) for row in body) for i in range(len(head))]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "| " + " | ".join(_placed(*cell) for cell in zip(row, widths, figures, strict=True)) + " |"
        for row in [list(head), *body]
    ]
    rule = [
        "-" * (w + 1) + ":" if right else "-" * (w + 2)
        for w, right in zip(widths, figures, strict=True)
    ]
    return "\n".join([f"### {title}", "", lines[0], f"|{'|'.join(rule)}|", *lines[1:], ""])


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        size = abs(value)
        digits = 0 if size >= 1000 else 1 if size >= 100 else 3 if 0 < size < 0.1 else 2
        return f"{value:.{digits}f}"
    return str(value)


def _is_figure(cell: str) -> bool:
    return cell == "–" or cell.lstrip("+-−").replace(".", "", 1).replace(" %", "").isdigit()


def _placed(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def machine() -> str:
    """Describe the machine: processor, threads, versions."""
    names = ("torch", "transformers", "quark")
    versions = [f"{name} {found}" for name in names if (found := _version(name))]
    python = f"Python {platform.python_version()}"
    return ", ".join([_processor(), "one thread", platform.system(), python, *versions])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
