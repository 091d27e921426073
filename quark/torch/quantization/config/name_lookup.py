"""Look-up of names, with suggestions for unknown names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

E = TypeVar("E", bound=Enum)


def one_of(name: object, choices: Iterable[str], what: str) -> str:
    """Return the choice that equals ``name``, ignoring case.

    Args:
        name: The name.
        choices: Known names.
        what: What is named, for the message.

    Raises:
        TypeError: It is no text.
        ValueError: The name is unknown. The message has the nearest choice, and all choices.
    """
    choices = list(choices)
    if not isinstance(name, str):
        known = ", ".join(choices) or "none"
        raise TypeError(f"{what}: expected a name, got {name!r}. Known: {known}.")
    for choice in choices:
        if name == choice:
            return choice
    for choice in choices:
        if name.lower() == choice.lower():
            return choice
    raise ValueError(unknown(name, choices, what))


def unknown(name: object, choices: Iterable[str], what: str) -> str:
    """Return the message for an unknown name, with the nearest choice and all choices."""
    choices = list(choices)
    near = nearest(str(name), choices, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what}: {name!r} is unknown.{hint} Known: {', '.join(choices) or 'none'}."


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return a text with escapes such as ``\x1b`` in place of characters that control a terminal.

    Line feeds and tabs stay. Names of files, tensors and options may come from anyone.
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def nearest(name: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choices most similar to ``name``, best first: misspelled, cut off, others."""
    by_lower, lower = {choice.lower(): choice for choice in choices}, name.lower()
    longer = [n for n in by_lower if len(lower) > 2 and n.startswith(lower)]
    misspelled, similar = (
        difflib.get_close_matches(lower, by_lower, count, ratio) for ratio in (0.75, 0.5)
    )
    return [by_lower[n] for n in dict.fromkeys([*misspelled, *longer, *similar])][:count]


def names_as_subject(names: Iterable[str], count: int = 3) -> str:
    """Return names as the subject of a sentence, with its verb, for messages.

    Examples: ``a is``, ``a, b are``, ``a, b, c and 4 more are``.
    """
    first, *rest = sorted(names)
    more = f" and {len(rest) + 1 - count} more" if len(rest) >= count else ""
    return ", ".join([first, *rest][:count]) + more + (" are" if rest else " is")


def member(enum: type[E], value: E | str | None, what: str) -> E | None:
    """Return the member of ``enum`` with the name ``value``, or ``value`` if it is a member.

    Raises:
        TypeError: The value is neither a member nor a text.
        ValueError: No member has that name; the message names the nearest.
    """
    if value is None or isinstance(value, enum):
        return value
    return enum[one_of(value, enum.__members__, what)]
