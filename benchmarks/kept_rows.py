"""Rows of ``three_texts.py`` that are kept in ``three_texts.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

KEPT = Path(__file__).with_name("three_texts.json")
SAME = 1e-3  # relative difference of perplexity in float that processors make of the same weights


def kept() -> dict[str, Any]:
    """Return the measurements by name of the model."""
    return json.loads(KEPT.read_text("utf-8")) if KEPT.is_file() else {}


def check_kept(name: str, base: Mapping[str, float], anew: bool) -> None:
    """Raise ValueError if the kept rows are of other weights; with ``anew``, drop them.

    Models that are trained here get other weights on another kind of processor.

    Args:
        name: Name of the model.
        base: Its perplexity in float, by text.
        anew: Whether rows of other weights are dropped.
    """
    models = kept()
    before = models.get(name, {}).get("float", base)
    if all(math.isclose(before[text], base[text], rel_tol=SAME) for text in base):
        return
    if not anew:
        raise ValueError(
            f"The kept rows of {name} are of other weights: their perplexity in float is {before}, "
            f"that of this model {base}. Pass --anew to drop them, or a directory as --model to "
            "keep nothing."
        )
    del models[name]
    _write(models)


def keep(name: str, vocabulary: int, base: Mapping[str, float], row: Row) -> None:
    """Write a row to the file, in place of the one with the same scheme and algorithms."""
    models = kept()
    rows = models.get(name, {}).get("rows", ())
    models[name] = {
        "vocabulary": vocabulary,
        "float": base,
        "rows": [*(other for other in rows if not is_same(other, row)), row],
    }
    _write(models)


def is_same(row: Row, other: Row) -> bool:
    """Return whether two rows quantize in the same way, on the same data."""
    keys = ("software", "scheme", "algorithms", "part", "sampled")
    return all(row.get(key) == other.get(key) for key in keys)


def _write(models: Mapping[str, Any]) -> None:
    KEPT.write_text(json.dumps(models).replace('{"scheme"', '\n{"scheme"') + "\n", "utf-8")
