"""Shares of scripts in texts, and the sentence about those that calibration lacked."""

import pytest

from quark.torch.evaluation.scripts import (
    describe_scripts,
    describe_uncovered,
    read_shares,
    script_shares,
    uncovered_scripts,
    write_shares,
)


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Straße, naïve, fı", "Latin"),
        ("Привет", "Cyrillic"),
        ("μῆνις", "Greek"),
        ("你好，世界", "Han"),
        ("ひらがな", "Hiragana"),
        ("カタカナー", "Katakana"),
        ("한국어", "Hangul"),
        ("नमस्ते", "Devanagari"),
        ("مرحبا", "Arabic"),
        ("שלום", "Hebrew"),
        ("สวัสดี", "Thai"),
        ("ｆｕｌｌ ℌ ﬁ 𝐱", "Latin"),  # variants
        ("12 µ", "Greek"),  # the sign of micro is a mu
    ],
)
def test_a_text_of_one_script(text, script):
    assert script_shares([text]) == {script: 1.0}


def test_shares_are_those_of_letters():
    shares = script_shares(["ab 12!", "\n", "вг", "", "cdef 🙂"])
    assert shares == {"Latin": 6 / 8, "Cyrillic": 2 / 8}
    assert list(shares) == ["Latin", "Cyrillic"]
    assert script_shares(["1 + 2", "…"]) == script_shares([]) == {}


def test_shares_in_words():
    shares = {"Latin": 0.95, "Han": 0.0496, "Greek": 0.0003, "Thai": 0.0001}
    assert describe_scripts(shares) == "Latin 95.0 %, Han 5.0 %, Greek < 0.1 %, Thai < 0.1 %"
    assert describe_scripts(shares, most=1) == "Latin 95.0 %, 3 others 5.0 %"
    assert describe_scripts(shares, most=3) == (
        "Latin 95.0 %, Han 5.0 %, Greek < 0.1 %, 1 other < 0.1 %"
    )
    assert describe_scripts({}) == ""


def test_what_calibration_lacks():
    calibration = {"Latin": 0.9988, "Han": 0.001, "Thai": 0.0002}
    text = {"Latin": 0.9, "Thai": 0.06, "Han": 0.02, "Cyrillic": 0.01, "Greek": 0.0099}
    assert uncovered_scripts(calibration, text) == ["Thai", "Cyrillic"]
    said = describe_uncovered(calibration, text)
    assert "lacks: Thai (6.0 % of its letters), Cyrillic (1.0 % of its letters)." in said
    assert describe_uncovered(calibration, calibration) == ""
    assert describe_uncovered({}, text) == ""  # calibration text is not known


def test_a_line_of_shares_is_read_again():
    shares = {"Latin": 0.95, "Han": 0.05}
    assert write_shares(shares) == "Latin 0.9500, Han 0.0500"
    assert read_shares(write_shares(shares)) == shares
    assert read_shares(write_shares({})) == {}
