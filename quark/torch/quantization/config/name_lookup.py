"""Look-up of names that people write, with an answer when they are not found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def one_of(name: str, choices: Iterable[str], what: str) -> str:
    """Return the choice that ``name`` is, whatever its case.

    Raises:
        ValueError: It is none of them. The message has the nearest and all others.
    """
    choices = list(choices)
    for choice in choices:
        if name == choice:
            return choice
    for choice in choices:
        if name.lower() == choice.lower():
            return choice
    raise ValueError(unknown(name, choices, what))


def unknown(name: str, choices: Iterable[str], what: str) -> str:
    """Return the sentence that says ``name`` is unknown and what could have been meant."""
    choices = list(choices)
    near = nearest(name, choices, count=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what}: {name!r} is unknown.{hint} Known: {', '.join(choices) or 'none'}."


def nearest(name: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """Return the choices most like ``name``, best first."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[n] for n in difflib.get_close_matches(name.lower(), by_lower, count, 0.5)]
