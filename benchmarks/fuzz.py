"""Damaged files at every door: each is refused with a clear error, or loaded with the same result.

    python benchmarks/fuzz.py --rounds 500 [--seed 0] [--doors gptq gguf] [--json FILE]

``--json docs/checkpoints.json`` keeps the counts of each door there, after every KEEP rounds, and
goes on after the last of them. Rounds write and remove small files: a directory in memory
(``TMPDIR=/dev/shm``) spares the disk.

A round takes small files (``sound_files.py``), damages them (``damage.py``), and opens them by a
door (``doors.py``). A quarter of the rounds changes bytes, lengths or values of a file or of a
member of an archive, a quarter damages one tensor (missing, renamed, of another type or shape,
cut), a quarter puts a number such as NaN or 1e38 into one, and a quarter flips a bit and has
digests compared.

ValueError and OSError with a message are clear refusals. These are defects, printed with the round
that repeats them: any other error (at the door of Transformers: any other error from this package),
more than LIMIT_SECONDS of CPU time (Windows does not limit it), no answer within WAIT_SECONDS, more
than LIMIT_BYTES of memory (where the system tells), the end of the process, a result that differs
although a tensor, an index or the header of a safetensors file was damaged, or such a file was cut,
a flipped bit that is not noticed, and, where a door opens files in two ways (in memory and in
parts, say), two outcomes.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from damage import (
    DAMAGES,
    KEPT,
    damage_data,
    damage_file,
    damage_tensor,
    damage_values,
    tensor_files,
)
from doors import DOORS, Door, available
from measure import peak_memory
from sound_files import write

LIMIT_SECONDS, WAIT_SECONDS, LIMIT_BYTES = 20, 600, 1 << 30
KEEP, SOUND = 250, "sound"
# Exit status of a process that used up its CPU time. Windows has no timer of CPU time.
OUT_OF_TIME = -signal.SIGPROF if hasattr(signal, "SIGPROF") else None
OUTCOMES = ("refused", "loaded", "defect")
OURS = "/quark/"
DESCRIPTIONS = (".index.json", KEPT)  # of tensors, whose values are the same


def open_damaged(door: Door, directory: Path, damage: str, expected: torch.Tensor | None) -> str:
    """Open damaged files and return the outcome: refused, loaded, or the defect."""
    before = peak_memory()
    try:
        result = door.open(directory, damage == "data")
        outcome = _compare(result, damage, expected, door.is_safe)
    except (ValueError, OSError, ImportError) as error:
        outcome = "refused" if str(error).strip() else f"no message: {type(error).__name__}"
    except Exception as error:  # whatever else it raises is a defect
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        outcome = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"
        if not door.is_ours and not any(OURS in Path(f.filename).as_posix() for f in frames):
            outcome = "refused"
    grown = (peak_memory() or 0) - (before or 0)
    return f"{grown >> 20} MB of memory" if grown > LIMIT_BYTES else outcome


def _compare(
    result: torch.Tensor | None, damage: str, expected: torch.Tensor | None, is_safe: bool
) -> str:
    """Return the outcome of a load."""
    if damage == "data":
        return "a flipped bit is not noticed"
    if not (is_safe or damage in ("tensor", "description")) or expected is None:
        return "loaded"
    is_same = result is not None and torch.equal(result, expected)
    return "loaded" if is_same else "another result, without a word"


def limit_cpu_time(seconds: float) -> None:
    """End this process after so many more seconds of CPU time, if the system can; 0: no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def serve(pipe: Connection) -> None:
    """Open sound files of a door, or damaged ones, and answer with the outcome."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    expected = None
    while request := pipe.recv():
        name, directory, kind = request
        if kind == SOUND:
            expected = DOORS[name].open(directory, DOORS[name].has_digests)
            pipe.send("loaded")
            continue
        limit_cpu_time(LIMIT_SECONDS)
        outcome = open_damaged(DOORS[name], directory, kind, expected)
        limit_cpu_time(0)
        pipe.send(outcome)


class Opener:
    """Opens files in another process, and starts a new one if it hangs or ends."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start a process."""
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads of torch
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Let the process end."""
        self.pipe.send(None)
        self.process.join()

    def set_door(self, name: str, sound: Path) -> None:
        """Choose the door of the next files, and wait until it has opened the sound files."""
        self.name, self.sound = name, sound
        self.pipe.send((name, sound, SOUND))
        try:
            self.pipe.recv()
        except (EOFError, OSError):
            raise SystemExit(f"sound files are not loaded by the door {name}") from None

    def open(self, directory: Path, damage: str) -> str:
        """Open damaged files within the time limits, and return the outcome."""
        self.pipe.send((self.name, directory, damage))
        try:
            if self.pipe.poll(WAIT_SECONDS):
                outcome: str = self.pipe.recv()
                return outcome
            outcome = f"no answer within {WAIT_SECONDS} seconds"
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            outcome = "too slow" if code == OUT_OF_TIME else f"the process ended with {code}"
        self.process.kill()
        self.start()
        self.set_door(self.name, self.sound)
        return outcome


def damage(directory: Path, door: Door, chance: random.Random) -> tuple[str, str]:
    """Damage a copy of the files of a door; return the kind of damage, and where it is."""
    kinds = [kind for kind in DAMAGES if kind != "data" or door.has_digests]
    if not tensor_files(directory):
        kinds = [kind for kind in kinds if kind not in ("tensor", "values")]
    kind = chance.choice(kinds)
    change = {
        "file": damage_file,
        "tensor": damage_tensor,
        "values": damage_values,
        "data": damage_data,
    }[kind]
    place = change(directory, chance)
    return "description" if place.endswith(DESCRIPTIONS) else kind, place


def run(opener: Opener, rounds: range, seed: int, work: Path) -> Counter[str]:
    """Return the count of each outcome at the door of an opener."""
    name, counts = opener.name, Counter[str]()
    for i in rounds:
        copy = work / f"{name}-{i}"  # what is still open cannot be written anew on some systems
        shutil.copytree(opener.sound, copy)
        kind, place = damage(copy, DOORS[name], random.Random(f"{name}-{seed}-{i}"))
        outcome = opener.open(copy, kind)
        shutil.rmtree(copy, ignore_errors=True)
        if outcome not in ("loaded", "refused"):
            words = " ".join(outcome.split())[:200]
            print(f"  defect: {name}, seed {seed}, round {i}, {kind} {place}: {words}", flush=True)
            outcome = "defect"
        counts[outcome] += 1
    return counts


class Kept:
    """Counts of each door, in the file of ``--json`` if there is one."""

    def __init__(self, file: Path | None, seed: int) -> None:
        self.file, self.seed = file, seed
        self.data: dict[str, Any] = json.loads(file.read_text("utf-8")) if file else {}
        self.rows: list[dict[str, Any]] = self.data.setdefault("damaged", [])

    def row(self, name: str) -> dict[str, Any]:
        """Return the counts of a door with this seed."""
        for row in self.rows:
            if (row["door"], row["seed"]) == (name, self.seed):
                return row
        row = {"door": name, "seed": self.seed, "rounds": 0, **dict.fromkeys(OUTCOMES, 0)}
        self.rows.append(row)
        return row

    def add(self, name: str, counts: Counter[str]) -> None:
        """Add counts of further rounds at a door."""
        row = self.row(name)
        for outcome in OUTCOMES:
            row[outcome] += counts[outcome]
        row["rounds"] += sum(counts.values())
        row["date"] = date.today().isoformat()
        self.rows.sort(key=lambda row: (row["door"], row["seed"]))
        if self.file:
            text = json.dumps(self.data, indent=1, ensure_ascii=False) + "\n"
            self.file.write_text(text, "utf-8")


def main() -> int:
    """Print a line for each door; return 1 if there is a defect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500, help="of each door")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doors", nargs="+", choices=[*DOORS], default=available())
    parser.add_argument("--json", type=Path, help="file that keeps the counts")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    kept, opener = Kept(args.json, args.seed), Opener()
    print("door".ljust(20) + "".join(f"{k:>9}" for k in OUTCOMES))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for name in args.doors:
            sound = Path(place) / "sound" / DOORS[name].kind
            if not sound.exists():
                sound.parent.mkdir(exist_ok=True)
                write(DOORS[name].kind, sound)
            opener.set_door(name, sound)
            while (done := kept.row(name)["rounds"]) < args.rounds:
                rounds = range(done, min(done + KEEP, args.rounds))
                kept.add(name, run(opener, rounds, args.seed, Path(place) / "work"))
            row = kept.row(name)
            print(name.ljust(20) + "".join(f"{row[k]:>9}" for k in OUTCOMES), flush=True)
        opener.end()
    return 1 if any(row["defect"] for row in kept.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
