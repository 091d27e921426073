"""Scripts of a text: which share of its letters is Latin, Cyrillic, Han and so on."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

# The name of a letter begins with its script: CYRILLIC SMALL LETTER A, HANGUL SYLLABLE GA.
_TITLES = {"CJK": "Han"}
_OF_SCRIPTS = ("LETTER", "SYLLABLE", "IDEOGRAPH", "CHARACTER", "VOWEL")
LEAST_EVALUATED, LEAST_CALIBRATED = 0.01, 0.001  # shares of the letters


def script_shares(texts: Iterable[str]) -> dict[str, float]:
    """Return the share of each script among the letters of texts; see ``count_letters``."""
    return shares_of(count_letters(texts))


def shares_of(letters: Mapping[str, int]) -> dict[str, float]:
    """Return the share of each script, the largest first, given its number of letters."""
    total = sum(letters.values())
    ordered = sorted(letters.items(), key=lambda item: -item[1])
    return {script: count / total for script, count in ordered if count}


def count_letters(texts: Iterable[str]) -> dict[str, int]:
    """Return the number of letters of each script in texts.

    Digits, marks, signs and letters that belong to no script count for nothing. Variants such as
    full-width letters count as the letters that they stand for (NFKC).

    Args:
        texts: Texts of any length.

    Returns:
        Script, such as ``Latin`` or ``Han``, to a number; empty without letters.
    """
    characters: Counter[str] = Counter()
    for text in texts:
        characters.update(text)
    letters: Counter[str] = Counter()
    for character, count in characters.items():
        for script in _scripts_of(character):
            letters[script] += count
    return dict(letters.most_common())


def _scripts_of(character: str) -> Iterator[str]:
    """Iterate over the scripts of the letters that a character stands for: one, none or more."""
    for letter in unicodedata.normalize("NFKC", character):
        words = unicodedata.name(letter, "").replace("-", " ").split()
        if unicodedata.category(letter)[0] == "L" and any(word in _OF_SCRIPTS for word in words):
            yield _TITLES.get(words[0], words[0].capitalize())


def describe_scripts(shares: Mapping[str, float], most: int = 6) -> str:
    """Return shares in words, such as ``Latin 93.1 %, Han 5.0 %, 2 others 1.9 %``.

    Args:
        shares: Result of ``script_shares``.
        most: Maximum number of scripts to name.
    """
    rows = [*shares.items()]
    if rest := rows[most:]:
        others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
        rows = [*rows[:most], (others, sum(share for _, share in rest))]
    return ", ".join(f"{script} {_percent(share)}" for script, share in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= LEAST_CALIBRATED else "< 0.1 %"


def uncovered_scripts(calibration: Mapping[str, float], text: Mapping[str, float]) -> list[str]:
    """Return the scripts of a text that calibration lacked.

    Args:
        calibration: Shares of the calibration text.
        text: Shares of the other text. A script counts from 1 % of its letters on, and is lacking
            where less than 0.1 % of the letters of the calibration text are of it.
    """
    return [
        script
        for script, share in text.items()
        if share >= LEAST_EVALUATED and calibration.get(script, 0.0) < LEAST_CALIBRATED
    ]


def describe_uncovered(calibration: Mapping[str, float], text: Mapping[str, float]) -> str:
    """Return a sentence on the scripts that calibration lacked; "" if it lacked none.

    Args:
        calibration: Shares of the calibration text; empty if they are not known.
        text: Shares of the evaluation text.
    """
    lacking = uncovered_scripts(calibration, text) if calibration else []
    if not lacking:
        return ""
    named = ", ".join(f"{script} ({_percent(text[script])} of its letters)" for script in lacking)
    return (
        f"The evaluation text has scripts that the calibration text lacks: {named}. Give --dataset "
        "a share of such text if the model is to read it."
    )


def write_shares(shares: Mapping[str, float]) -> str:
    """Return shares as one line for a file, such as ``Latin 0.9500, Han 0.0500``."""
    return ", ".join(f"{script} {share:.4f}" for script, share in shares.items())


def read_shares(line: str) -> dict[str, float]:
    """Return the shares in a line of ``write_shares``."""
    parts = (part.split(" ") for part in line.split(", ") if part)
    return {script: float(share) for script, share in parts}
