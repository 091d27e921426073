"""Languages of a text, which the package py3langid tells; languages of one script too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

PIECE = 1500  # characters whose language is told together
SURE = 0.9  # probability from which on a language counts
UNSURE = "not sure"


def count_languages(texts: Iterable[str]) -> dict[str, int]:
    """Return the number of characters of texts in each language.

    Consecutive texts are joined to pieces of 1500 characters, each of which has one language.

    Args:
        texts: Texts in order, such as windows of one text.

    Returns:
        Code of the language (ISO 639-1), or ``not sure``, to a number; empty where py3langid is not
        installed.
    """
    identifier = _identifier()
    if identifier is None:
        return {}
    characters: Counter[str] = Counter()
    for piece in _pieces(texts):
        language, probability = identifier.classify(piece)
        characters[str(language) if probability >= SURE else UNSURE] += len(piece)
    return dict(characters.most_common())


def _identifier() -> Any | None:
    try:
        langid: Any = import_module("py3langid.langid")
    except ImportError:
        return None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Iterate over pieces of joined texts; a last one of less than a half is left out."""
    rest = ""
    is_first = True
    for text in texts:
        rest += text
        while len(rest) >= PIECE:
            yield rest[:PIECE]
            rest, is_first = rest[PIECE:], False
    if len(rest) >= PIECE // 2 or (is_first and rest.strip()):
        yield rest
