"""Languages of texts: those of one script are told apart."""

import sys

import pytest

from quark.torch.evaluation.languages import PIECE, UNSURE, count_languages

ENGLISH = "The model reads the text of each window, and the scale of every layer follows from it. "
GERMAN = "Das Modell liest den Text jedes Fensters, und daraus folgt der Maßstab jeder Schicht. "
FRENCH = "Le modèle lit le texte de chaque fenêtre, et l'échelle de chaque couche en résulte. "


def long(sentence, pieces):
    return (sentence * (PIECE // len(sentence) + 1))[:PIECE] * pieces


def test_languages_of_one_script():
    pytest.importorskip("py3langid")
    text = long(ENGLISH, 2) + long(GERMAN, 1) + long(FRENCH, 1)
    expected = {"en": 2 * PIECE, "de": PIECE, "fr": PIECE}
    assert count_languages([text]) == expected
    windows = [text[start : start + 100] for start in range(0, len(text), 100)]
    assert count_languages(windows) == expected


def test_what_has_no_language_is_not_sure():
    pytest.importorskip("py3langid")
    assert set(count_languages(["0 1 2 3 4 5 6 7 8 9 " * 50])) == {UNSURE}
    assert count_languages(["  \n"]) == count_languages([]) == {}
    assert count_languages([GERMAN]) == {"de": len(GERMAN)}


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    assert count_languages([ENGLISH]) == {}
