"""The bound of the memory of a process, divided among what needs memory."""

from __future__ import annotations

from typing import NamedTuple

import psutil
import torch

from quark.torch.pipeline.activation_store import LIMIT
from quark.torch.pipeline.allocator import return_free_memory

WEIGHTS, ACTIVATIONS = 2, 4  # parts of what is left that parameters and activations may take


class MemoryLimit(NamedTuple):
    """Bounds of what grows with a model and its data.

    Attributes:
        weights: Bytes of parameters, on their device.
        activations: Bytes of activations, in main memory.
        room: Bytes of main memory for all of a run; None if parameters lie on another device.
    """

    weights: int
    activations: int
    room: int | None


def taken_memory() -> int:
    """Return the bytes of main memory that this process takes now, after it returns what it can."""
    return_free_memory()
    return int(psutil.Process().memory_info().rss)


def free_memory(device: torch.device | str = "cpu") -> int:
    """Return the bytes that are free where a model on a device is loaded: in main memory as well.

    Devices that do not know their memory count as large.
    """
    main = int(psutil.virtual_memory().available)
    free = free_on_device(torch.device(device))
    return main if free is None else min(main, free)


def free_on_device(device: torch.device) -> int | None:
    """Return the free bytes of a device; None for main memory, and where they are not known."""
    if device.type == "cpu":
        return None
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[0])


def divide_memory(bound: int | None = None, device: torch.device | str = "cpu") -> MemoryLimit:
    """Divide what a process may still take: the rest is for the work on one block.

    Args:
        bound: Bytes that the process may take in all, what it has taken included; None for what
            the machine has free.
        device: Device of the parameters, of whose free memory they take at most half.

    Raises:
        ValueError: The process has taken more than that.
    """
    taken = taken_memory()
    left = psutil.virtual_memory().available if bound is None else bound - taken
    if left <= 0:
        raise ValueError(
            f"max_memory: {_megabytes(bound or 0)} are less than the {_megabytes(taken)} that this "
            "process has taken before a model is loaded. Give more."
        )
    free = free_on_device(torch.device(device))
    room = left if free is None else free if bound is None else min(left, free)
    is_shared = torch.device(device).type == "cpu"
    return MemoryLimit(room // WEIGHTS, left // ACTIVATIONS, left if is_shared else None)


def results_limit(streams: bool, bound: int | None, device: torch.device | str) -> int:
    """Return the bytes that each of two kinds of results of an evaluation may hold in memory.

    Args:
        streams: Whether the model is read in parts.
        bound: As for ``divide_memory``.
        device: Device of the parameters.

    Raises:
        ValueError: As ``divide_memory``.
    """
    return (divide_memory(bound, device).activations if streams else LIMIT) // 2


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
