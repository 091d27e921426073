"""The bound of the memory of a process, divided among what needs memory."""

from __future__ import annotations

from typing import NamedTuple

import psutil

_WEIGHTS, _ACTIVATIONS = 2, 4  # parts of what is left that parameters and activations may take


class MemoryLimit(NamedTuple):
    """Bounds of what grows with a model and its data.

    Attributes:
        weights: Bytes of parameters.
        activations: Bytes of activations.
    """

    weights: int
    activations: int


def divide_memory(bound: int | None = None) -> MemoryLimit:
    """Divide what a process may still take: the rest is for the work on one block.

    Args:
        bound: Bytes that the process may take in all, what it has taken included; None for what
            the machine has free.

    Raises:
        ValueError: The process has taken more than that.
    """
    taken = psutil.Process().memory_info().rss
    left = psutil.virtual_memory().available if bound is None else bound - taken
    if left <= 0:
        raise ValueError(
            f"max_memory: {_megabytes(bound or 0)} are less than the {_megabytes(taken)} that this "
            "process has taken before a model is loaded. Give more."
        )
    return MemoryLimit(left // _WEIGHTS, left // _ACTIVATIONS)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
