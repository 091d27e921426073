"""Check of values against type annotations: from JSON, in dataclasses of options, and arguments."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

_LARGEST = 1 << 63  # integers beyond it have no type in torch
_JSON = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_PYTHON = {**_JSON, bool: "True or False", dict: "a dict", type(None): "None"}
_KINDS = {Sequence: list, Mapping: dict}  # abstract types, and those that JSON has for them


def check_options(options: Any, path: str | None = None) -> None:
    """Check that the fields of a dataclass have values of their types.

    Args:
        options: An object of the dataclass.
        path: Path to the fields, for the message; None for the name of the class.

    Raises:
        TypeError: A field has a value of another type.
    """
    try:
        name = type(options).__name__ if path is None else path
        check_fields(vars(options), type(options), name, _PYTHON)
    except ValueError as error:
        raise TypeError(str(error)) from None


def check_types(hint: Any, **arguments: Any) -> None:
    """Check that arguments of a function have a type.

    Args:
        hint: The annotation, such as ``bool`` or ``int | None``.
        **arguments: Values by name.

    Raises:
        TypeError: A value has another type.
    """
    for name, value in arguments.items():
        try:
            check_value(value, hint, name, _PYTHON)
        except ValueError as error:
            raise TypeError(str(error)) from None


def check_fields(
    data: Mapping[str, Any], cls: type, path: str = "", words: Mapping[Any, str] = _JSON
) -> None:
    """Check that values fit the annotations of the fields of a dataclass.

    Args:
        data: Name of a field -> value from JSON. Other names are not checked.
        cls: The dataclass.
        path: Path to ``data``, for the message.
        words: Names of types, for the message.

    Raises:
        ValueError: A value has another type; the message has the path to it.
    """
    hints = _hints(cls)
    for field in fields(cls):
        if field.name in data:
            check_value(data[field.name], hints[field.name], _join(path, field.name), words)


def check_value(value: Any, hint: Any, path: str, words: Mapping[Any, str] = _JSON) -> None:
    """Check that a value from JSON fits a type annotation.

    Enums are given by name. Objects that are read into dataclasses are not checked here: whoever
    reads them checks their fields.

    Args:
        value: The value.
        hint: The annotation, such as ``dict[str, list[int]] | None``.
        path: Path to the value, for the message.
        words: Names of types, for the message.

    Raises:
        ValueError: It does not fit; the message has the path to the first part that does not.
    """
    origin, arguments = _kind(get_origin(hint)), get_args(hint)
    if origin in (Union, types.UnionType):
        _check_union(value, arguments, path, words)
    elif origin is list and isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            check_value(part, arguments[0], f"{path}[{index}]", words)
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(value) != len(arguments):
            raise ValueError(f"{path}: expected {len(arguments)} values, got {_short(value)}.")
        for index, part in enumerate(value):
            check_value(part, arguments[index], f"{path}[{index}]", words)
    elif origin is dict and isinstance(value, dict):
        for key, part in value.items():
            check_value(part, arguments[1], _join(path, key), words)
    elif not _fits(value, origin or hint, words):
        expected = words.get(origin or hint, "a name")
        raise ValueError(f"{path}: expected {expected}, got {_short(value)}.")


def _check_union(value: Any, hints: tuple[Any, ...], path: str, words: Mapping[Any, str]) -> None:
    """Check that a value fits one of several annotations; name the part that does not."""
    for hint in hints:
        if _fits(value, _kind(get_origin(hint) or hint), words):
            check_value(value, hint, path, words)
            return
    names = [words.get(_kind(get_origin(hint) or hint), "a name") for hint in hints]
    expected = " or ".join(dict.fromkeys(names))
    raise ValueError(f"{path}: expected {expected}, got {_short(value)}.")


def _fits(value: Any, kind: Any, words: Mapping[Any, str]) -> bool:
    """Whether a value is of a type, its parts aside. In JSON, a number is also finite."""
    if kind is Any or not isinstance(kind, type) or (isinstance(value, kind) and kind is bool):
        return True
    if kind is int:
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        return is_integer and abs(int(value)) < _LARGEST
    if kind is float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        is_finite = is_number and abs(value) < _LARGEST and math.isfinite(value)
        return is_finite if words is _JSON else is_number
    if issubclass(kind, Enum):
        return isinstance(value, (str, kind))
    if kind in (list, tuple):
        return isinstance(value, (list, tuple))
    return kind not in _JSON or isinstance(value, kind)


def _kind(kind: Any) -> Any:
    """Return the type that JSON has for an abstract one; another type unchanged."""
    return _KINDS.get(kind, kind)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
