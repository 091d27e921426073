"""Speed and memory of a model in a process of its own, whose peak no other model has raised."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.report.speed import Speed


def measure_in_process(
    load: Callable[[Path], Any], directory: Path, tokens: list[int], new_tokens: int
) -> Speed:
    """Return the speed of a model, measured in a new process.

    Args:
        load: Returns the model of a directory; it can be pickled.
        directory: Directory of the model, or its file.
        tokens: Token identifiers of the prompt.
        new_tokens: Tokens to write, two or more.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(_measure, load, directory, tokens, new_tokens).result()


def _measure(
    load: Callable[[Path], Any], directory: Path, tokens: list[int], new_tokens: int
) -> Speed:
    import torch

    from quark.cli import console
    from quark.torch.report.speed import measure_speed

    with console.session():
        return measure_speed(load(directory), torch.tensor([tokens]), new_tokens)
