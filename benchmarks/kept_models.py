"""Models that benchmarks train once and keep in ``build/models``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import say

FOLDER = Path(__file__).resolve().parent.parent / "build" / "models"


def directory_of(name: str, train: Callable[[], tuple[Any, Any]]) -> Path:
    """Return the directory of a model and its tokenizer; train the model on first use.

    Args:
        name: Name of the directory.
        train: Returns the model and the tokenizer.
    """
    place = FOLDER / name
    if not place.is_dir():
        say(f"training a model, once, into {place}")
        shutil.rmtree(partial := place.with_suffix(".partial"), ignore_errors=True)
        for part in train():
            part.save_pretrained(partial)
        partial.rename(place)
    return place
