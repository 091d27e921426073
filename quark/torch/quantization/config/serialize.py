"""Conversion of configurations to plain JSON types and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from typing import Any

from quark.torch.quantization.config.name_lookup import unknown


def plain(value: Any) -> Any:
    """Return the name of an enum member or class, and other values unchanged."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return value.__name__
    return value


def known(data: Any, cls: type, what: str) -> dict[str, Any]:
    """Return a copy of ``data`` after checking that its keys are fields of ``cls``.

    Raises:
        ValueError: ``data`` is not a dict, or a key is unknown; the message names the nearest.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected an object, got {data!r}.")
    names = sorted(f.name for f in fields(cls))
    for key in data:
        if key not in names:
            raise ValueError(unknown(key, names, f"key of {what}"))
    return dict(data)


@contextmanager
def path_of(name: str) -> Iterator[None]:
    """Put the name of a value before the message of an error about it.

    Raises:
        ValueError: The error, with the path to the value.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None
