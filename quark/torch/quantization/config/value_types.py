"""Check of values against type annotations: from JSON, in dataclasses of options, and arguments."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from quark.torch.quantization.config.bounds import Bounds

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
_FINITE = Bounds()


class OutOfRange(ValueError):
    """A number has the right type, and lies outside of its range."""


def check_options(options: Any, path: str | None = None) -> None:
    """Check that the fields of a dataclass have values of their types and ranges.

    Args:
        options: An object of the dataclass.
        path: Path to the fields, for the message; None for the name of the class.

    Raises:
        TypeError: A field has a value of another type.
        ValueError: A number is outside of its range.
    """
    name = type(options).__name__ if path is None else path
    with _type_errors():
        check_fields(vars(options), type(options), name, _PYTHON)


def check_types(hint: Any, **arguments: Any) -> None:
    """Check that arguments of a function have a type.

    Args:
        hint: The annotation, such as ``bool`` or ``int | None``.
        **arguments: Values by name.

    Raises:
        TypeError: A value has another type.
        ValueError: A number is outside of its range.
    """
    with _type_errors():
        for name, value in arguments.items():
            check_value(value, hint, name, _PYTHON)


@contextmanager
def _type_errors() -> Iterator[None]:
    """Raise TypeError for a value of another type, as Python does."""
    try:
        yield
    except OutOfRange:
        raise
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

    Enums are given by name. Objects of JSON that are read into dataclasses are not checked here:
    whoever reads them checks their fields.

    Args:
        value: The value.
        hint: The annotation, such as ``dict[str, list[int]] | None``.
        path: Path to the value, for the message.
        words: Names of types, for the message.

    Raises:
        ValueError: It does not fit; the message has the path to the first part that does not.
    """
    hint, bounds = _split(hint)
    kind, arguments = _kind(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        _check_union(value, arguments, path, words)
        return
    if not _fits(value, kind, words):
        raise ValueError(_message(value, [hint], path, words))
    if kind is list and arguments:
        for index, part in enumerate(value):
            check_value(part, arguments[0], f"{path}[{index}]", words)
    elif kind is tuple and arguments:
        if len(value) != len(arguments):
            raise ValueError(f"{path}: expected {len(arguments)} values, got {_short(value)}.")
        for index, part in enumerate(value):
            check_value(part, arguments[index], f"{path}[{index}]", words)
    elif kind is dict and arguments:
        for key, part in value.items():
            check_value(key, arguments[0], f"{path}: key", words)
            check_value(part, arguments[1], _join(path, key), words)
    elif kind in (int, float):
        problem = bounds.problem(value)
        if problem is not None:
            raise OutOfRange(f"{path} must be {problem}, got {_short(value)}.")


def _check_union(value: Any, hints: tuple[Any, ...], path: str, words: Mapping[Any, str]) -> None:
    """Check that a value fits one of several annotations; name the part that does not."""
    for hint in hints:
        if _fits(value, _kind(_split(hint)[0]), words):
            check_value(value, hint, path, words)
            return
    raise ValueError(_message(value, hints, path, words))


def _message(value: Any, hints: Iterable[Any], path: str, words: Mapping[Any, str]) -> str:
    """Return the message for a value that fits none of several annotations."""
    names = [_noun(_kind(_split(hint)[0]), words) for hint in hints]
    remedy = getattr(type(value), "instead", "")  # such as the method of a helper to call
    return f"{path}: expected {' or '.join(dict.fromkeys(names))}, got {_short(value)}.{remedy}"


def _noun(kind: Any, words: Mapping[Any, str]) -> str:
    """Return the name of a type in a message."""
    if kind in words:
        return words[kind]
    if words is _JSON or issubclass(kind, Enum):
        return "a name"
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def _fits(value: Any, kind: Any, words: Mapping[Any, str]) -> bool:
    """Whether a value is of a type, its parts aside. In JSON, a number is also finite."""
    if kind is Any or (isinstance(value, kind) and kind is bool):
        return True
    if kind is int:
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        return is_integer and abs(int(value)) < _LARGEST
    if kind is float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        return is_number and (words is _PYTHON or abs(value) < _LARGEST)
    if issubclass(kind, Enum):
        return isinstance(value, (str, kind))
    if kind in (list, tuple):
        return isinstance(value, (list, tuple))
    is_read = kind not in _JSON and (words is _JSON or hasattr(kind, "__set__"))
    return is_read or isinstance(value, kind)  # a descriptor checks its values itself


def _split(hint: Any) -> tuple[Any, Bounds]:
    """Return an annotation without the range of its number, and the range."""
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return kind, bounds
    return hint, _FINITE


def _kind(hint: Any) -> Any:
    """Return the type of an annotation without its parts; for an abstract type, that of JSON."""
    kind = get_origin(hint) or hint
    return _KINDS.get(kind, kind)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
