"""The page of a run: tables in Markdown."""

from __future__ import annotations

from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from quark.conformance.comparison import Comparison
from quark.torch.files import read_json

_HEAD = """# Conformance

`quark conform --page docs/conformance.md --checkpoints docs/checkpoints.json` wrote this page on
{date}, with quark {version}. It compares numbers of this package with definitions (exhaustive
searches in float64) and with other software, value by value, the sign of zeros included.

- **differences**: values for which this package departs from the definition.
- **deviations**: values for which the other software departs from the definition, as this package
  [documents](numerics.md) it. They are not errors of either: examples are below.

Inputs are all values of bfloat16 and float16, all middles between two values of a format, both
zeros, subnormal numbers, the largest values and infinities, each between its neighbours in float32;
blocks whose largest values are all positive bfloat16 values.
"""


# Columns of the counts of damaged files.
_COUNTS = ("door", "seed", "rounds", "refused", "loaded", "defect", "date")


class Run(NamedTuple):
    """Comparisons with one piece of software.

    Attributes:
        oracle: Its name.
        version: Its version, or "".
        comparisons: Results; None if it is not installed.
    """

    oracle: str
    version: str
    comparisons: list[Comparison] | None


class Total(NamedTuple):
    """Sums over the comparisons of a format."""

    values: int
    differences: int
    deviations: int


def by_format(comparisons: list[Comparison]) -> dict[str, Total]:
    """Return the sums over comparisons, by format."""
    sums: dict[str, Total] = defaultdict(lambda: Total(0, 0, 0))
    for c in comparisons:
        added = c.values, c.differences, c.deviations
        sums[c.format] = Total(*map(sum, zip(sums[c.format], added, strict=True)))
    return dict(sums)


def read_checkpoints(path: Path) -> dict[str, Any]:
    """Return the results of ``scripts/interop.py --json``.

    Those of ``scripts/foreign_checkpoints.py`` and of ``benchmarks/fuzz.py``, if there are any, are
    under ``foreign`` and ``damaged``.

    Raises:
        ValueError: The file holds something else.
    """
    results = read_json(path)
    if (
        not isinstance(results, dict)
        or not {"date", "versions", "rows"} <= results.keys()
        or not _have(results["rows"], {"client", "layout", "scheme", "result"})
        or not _have(results.get("foreign", []), {"writer", "kind", "result"})
        or not _have(results.get("damaged", []), {*_COUNTS})
    ):
        raise ValueError(f"{path} does not hold results of scripts/interop.py --json.")
    return results


def _have(rows: Any, columns: set[str]) -> bool:
    """Whether rows are objects with these columns."""
    return isinstance(rows, list) and all(
        isinstance(row, dict) and columns <= row.keys() for row in rows
    )


def render(runs: list[Run], version: str, checkpoints: dict[str, Any] | None = None) -> str:
    """Return the page.

    Args:
        runs: Comparisons.
        version: Version of this package.
        checkpoints: Results of ``read_checkpoints``, or None.
    """
    parts = [_HEAD.format(date=date.today().isoformat(), version=version), "## Numbers\n"]
    sums = [
        (name, _software(run), f"{t.values:,}", t.differences, t.deviations)
        for run in runs
        for name, t in by_format(run.comparisons or []).items()
    ]
    parts.append(
        _table("format | compared with | values | differences | deviations", "llrrr", sums)
    )
    missing = [run.oracle for run in runs if run.comparisons is None]
    if missing:
        parts.append(f"Not installed where this page was made: {', '.join(missing)}.\n")
    parts.append("## Deviations of other software\n")
    rows = [
        (_software(run), c.format, c.operation, f"{c.deviations:,}", f"{c.values:,}", c.example)
        for run in runs
        for c in run.comparisons or []
        if c.deviations
    ]
    head = "software | format | operation | deviations | values | first example"
    parts.append(_table(head, "lllrrl", rows))
    if checkpoints is not None:
        parts.append(_checkpoints(checkpoints))
        if checkpoints.get("foreign"):
            parts.append(_foreign(checkpoints["foreign"]))
        if checkpoints.get("damaged"):
            parts.append(_damaged(checkpoints["damaged"]))
    return "\n".join(parts)


def _software(run: Run) -> str:
    return f"{run.oracle} {run.version}".strip()


def _table(head: str, sides: str, rows: list[tuple[Any, ...]]) -> str:
    lines = [f"| {head} |", "|" + "|".join({"l": " --- ", "r": " ---: "}[s] for s in sides) + "|"]
    lines += [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _checkpoints(results: dict[str, Any]) -> str:
    """Return the section about checkpoints that other software opens."""
    versions = ", ".join(f"{name} {given}" for name, given in results["versions"].items())
    cells = ("client", "layout", "scheme", "result", "largest", "median", "perplexity", "date")
    rows = [tuple(row.get(cell) or "" for cell in cells) for row in results["rows"]]
    head = "reader | layout | scheme | result | largest | median | perplexity | date"
    return (
        "## Checkpoints\n\n"
        f"`scripts/interop.py --json` wrote these results, the last on {results['date']}. This "
        "package writes a quantized copy of the shipped model, and the reader computes "
        "log-probabilities of text. The next columns are the largest and the median difference "
        "from the model in memory, and the change of the perplexity. "
        f"Versions: {versions}.\n\n" + _table(head, "llllrrrl", rows)
    )


def _foreign(results: list[dict[str, Any]]) -> str:
    """Return the section about checkpoints that other software writes."""
    cells = ("writer", "kind", "result", "largest", "median", "perplexity")
    rows = [tuple(row.get(cell) or "" for cell in cells) for row in results]
    return (
        "## Checkpoints of other software\n\n"
        "`scripts/foreign_checkpoints.py` wrote these results. The writer quantizes the shipped "
        "model and computes log-probabilities of text from its files. This package loads the same "
        "files in float32. The last columns compare the two. llama.cpp rounds inputs to 8 bits, "
        "gptqmodel computes in bfloat16. AutoAWQ, and ModelOpt for NVFP4, dequantize the codes of "
        "their files; ModelOpt computes fp8 by the model that it wrote, still with quantizers. "
        "Where a layer rounds inputs, values beside a tie between two codes go either way.\n\n"
        + _table(" | ".join(cells), "lllrrr", rows)
    )


def _damaged(results: list[dict[str, Any]]) -> str:
    """Return the section about damaged files."""
    rows = [
        tuple(f"{row[c]:,}" if c in _COUNTS[2:6] else row[c] for c in _COUNTS) for row in results
    ]
    return (
        "## Damaged files\n\n"
        "`TMPDIR=/dev/shm python benchmarks/fuzz.py --rounds N --json docs/checkpoints.json` wrote "
        "these counts, and goes on where they end. A round damages a small checkpoint and reads "
        "it: bytes, lengths or JSON of a file, a tensor (missing, renamed, of another type or "
        "shape, cut), a number such as NaN in a tensor, or one bit, which digests must notice. "
        "The file is refused with a ValueError or OSError that has a message, or it is loaded. "
        "Where a tensor, an index or the header of a safetensors file was damaged, a loaded model "
        "must give the bits of the sound one; other values of tensors and of `config.json` may "
        "be those of another model. Anything else is a defect: other exceptions, other "
        "bits, more than 20 CPU seconds or 1 GiB, the end of the process. "
        "`layers …` are two linear layers, read by `ModelImporter`: a round takes 5 ms. "
        "`attention …` quantize queries, keys and values: in compressed-tensors with one scale and "
        "per head, in Quark's layout per head, and there with probabilities. "
        "`compressed …` and `k-quants packed` read files whole and in parts, which must agree.\n\n"
        + _table("reader | seed | files | refused | loaded | defects | last", "lrrrrrl", rows)
    )
