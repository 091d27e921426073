"""Fields of schemes as JSON, for operators whose arguments are tensors, numbers and strings."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from quark.torch.numerics.dtypes import ITEM_SIZES
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import FLOAT32, ScaleFormat

_ENUMS: dict[str, type[Enum]] = {"qscheme": QSchemeType, "rounding": RoundType}


def changed_fields(value: Any, usual: Any) -> dict[str, Any]:
    """Return the fields in which a dataclass differs from another one, as plain JSON types.

    Example: a scheme of int8 per channel, beside one per tensor, is {"qscheme": "per_channel"}.
    """
    names = (field.name for field in fields(value))
    pairs = ((name, getattr(value, name), getattr(usual, name)) for name in names)
    return {name: _plain(new) for name, new, old in pairs if new != old}


def read_fields(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a scheme from plain JSON types: the inverse of ``changed_fields``.

    Raises:
        ValueError: A name of a format or a type is not known.
        KeyError: A name of a mode is not known.
        TypeError: A field of a format is not known.
    """
    return {name: _read(name, value) for name, value in entries.items()}


def format_entry(fmt: Format) -> Any:
    """Return the name of a format, with the fields in which it differs from ``Dtype``."""
    changed = changed_fields(fmt, Dtype[fmt.name].value)
    return {"name": fmt.name, **changed} if changed else fmt.name


def format_text(fmt: Format) -> str:
    """Return a format as JSON."""
    return json.dumps(format_entry(fmt))


def read_format(text: str) -> Format:
    """Return the format of a text: the inverse of ``format_text``; see ``read_fields``."""
    fmt: Format = _read("fmt", json.loads(text))
    return fmt


def _plain(value: Any) -> Any:
    if isinstance(value, Format):
        return format_entry(value)
    if isinstance(value, ScaleFormat):
        return changed_fields(value, FLOAT32)
    return value.name if isinstance(value, Enum) else value


def _read(name: str, value: Any) -> Any:
    if name == "fmt":
        entry = {"name": value} if isinstance(value, str) else value
        return replace(Dtype(entry["name"]).value, **read_fields(entry))
    if name == "scale":
        return replace(FLOAT32, **read_fields(value))
    if name in ("dtype", "native", "word_dtype") and value not in (None, *ITEM_SIZES):
        raise ValueError(f"{value!r} is not a type of torch.")
    if name in _ENUMS:
        return _ENUMS[name][value]
    return tuple(value) if isinstance(value, list) else value
