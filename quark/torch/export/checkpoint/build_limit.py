"""Limits of the model that a ``config.json`` describes: what its files can hold, and no more.

A damaged or hostile file may describe a model of a billion layers. Building it, even without
values, would never end.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

MAX_COUNT = 1 << 16  # layers, experts, heads …
MAX_DEPTH = 64  # objects in objects
# Integers that Transformers repeats something by, in Python, before any module is made.
_COUNTS = re.compile(
    r"^(num|n)_.*(layer|expert|block|head|stage)|(layers?|experts|blocks|depths?|stages)$"
    r"|(block|expert|head|layer)_count$"
)
# Keys for the experts of a layer, and for those that a token takes.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TAKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")
# A checkpoint with few or small tensors may belong to a model with more: tied and fused parameters,
# modules without parameters, codes of less than a bit of each.
_SPARE_ELEMENTS = 1 << 24
_SPARE_TENSORS = 1 << 12
_SPARE_MODULES = 1 << 15
_ELEMENTS_PER_BYTE = 8
_PARAMETERS_PER_TENSOR = 8
_MODULES_PER_TENSOR = 32
_LEAST_TENSOR = 64  # bytes that a tensor takes in a file, with its name


def check_counts(config: Any, where: str | Path, path: str = "") -> None:
    """Check that the counts in a configuration are not larger than any model has.

    Args:
        config: Content of a ``config.json``, or a part of it.
        where: Source of the configuration, for messages.
        path: Keys that lead to the part.

    Raises:
        ValueError: A count is too large, a token takes more experts than there are, or objects are
            nested too deeply.
    """
    if path.count(".") > MAX_DEPTH:
        raise ValueError(f"{where}: objects are nested more than {MAX_DEPTH} deep.")
    if isinstance(config, Mapping):
        _check_experts(config, where)
    parts = config.items() if isinstance(config, Mapping) else enumerate(config)
    for key, value in parts:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, (Mapping, list, tuple)):
            check_counts(value, where, name)
        elif isinstance(value, int) and value > MAX_COUNT and _names_count(name):
            raise ValueError(f"{where}: {name}={value}, but no model has more than {MAX_COUNT}.")


def _check_experts(config: Mapping[str, Any], where: str | Path) -> None:
    """Check that there are as many experts as a token takes, where both are known.

    Models with less than two experts have none, whatever else their configuration says.
    """
    counts = [(key, n) for key in _EXPERTS if isinstance(n := config.get(key), int) and n > 1]
    for taken, least in ((key, config.get(key)) for key in _TAKEN):
        if counts and isinstance(least, int) and all(count < least for _, count in counts):
            key, count = counts[0]
            raise ValueError(f"{where}: {taken}={least}, but {key}={count}. Correct one of them.")


def _names_count(path: str) -> bool:
    """Whether the last key of a path, without numbers, is that of a count."""
    keys = [key for key in path.split(".") if not key.isdecimal()]
    return bool(keys and _COUNTS.search(keys[-1]))


@contextmanager
def limit_build(entries: Mapping[str, Any], where: str | Path) -> Iterator[None]:
    """Raise as soon as more modules or parameters are made than stored tensors can fill.

    Args:
        entries: Headers of the stored tensors.
        where: Source of the configuration, for messages.

    Raises:
        ValueError: More are made.
    """
    sizes = [e.nbytes if hasattr(e, "nbytes") else e.bytes for e in entries.values()]
    with _limit(sum(sizes), len(entries), where):
        yield


@contextmanager
def limit_build_by_size(size: int, where: str | Path) -> Iterator[None]:
    """Do the same for files of which only the size is known.

    Args:
        size: Bytes of the files.
        where: Source of the configuration, for messages.

    Raises:
        ValueError: More modules or parameters are made than the files can fill.
    """
    with _limit(size, size // _LEAST_TENSOR, where):
        yield


@contextmanager
def _limit(size: int, tensors: int, where: str | Path) -> Iterator[None]:
    left = {
        "elements": _ELEMENTS_PER_BYTE * size + _SPARE_ELEMENTS,
        "parameters": _PARAMETERS_PER_TENSOR * tensors + _SPARE_TENSORS,
        "modules": _MODULES_PER_TENSOR * tensors + _SPARE_MODULES,
    }
    thread = threading.get_ident()

    def spend(what: str, count: int) -> None:
        left[what] -= count
        if left[what] < 0:
            raise ValueError(
                f"{where}: the model has more {what} than its files, of {tensors} tensors and "
                f"{size} bytes, can fill. Correct config.json, or copy the files again."
            )

    def count_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread:
            spend("parameters", 1)
            spend("elements", parameter.numel())

    def count_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() == thread:
            spend("modules", 1)

    handles = [
        hooks.register_module_parameter_registration_hook(count_parameter),
        hooks.register_module_module_registration_hook(count_module),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
