"""The table of a comparison fits a terminal of 80 columns, with whole figures."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quark.cli import console
from quark.cli.compare.tables import _figure_table, print_comparison
from quark.torch.report.comparison import short_names


@dataclass
class Row:
    """A model of a comparison, with what the tables show of it."""

    name: str
    bytes: int
    bits_per_weight: float | None
    predictions: Any
    continuation: Any
    speed: Any = None
    tasks: Any = None
    weight_errors: Any = None


def row(name, bits, change):
    predictions = SimpleNamespace(
        perplexity=1234.56,
        change=change,
        change_error=0.1234,
        kl=change and 0.0388,
        kl_error=0.0041,
        agreement=change and 0.883,
        agreement_error=0.011,
    )
    return Row(
        name=name,
        bytes=163_400_000,
        bits_per_weight=bits,
        predictions=predictions,
        continuation=SimpleNamespace(tokens_per_second=123.4, text="Because."),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_figures_are_whole(width):
    rows = [row("models/SmolLM2-135M-Instruct", None, None), row("int4", 4.28, 2.3641)]
    console = Console(width=width, record=True)
    console.print(_figure_table(rows))
    shown = console.export_text()
    words = set(shown.split())
    figures = {"163", "1234.56", "4.28", "123.4", "+236.41%", "12.34%", "38.8", "4.1", "88.3%"}
    assert figures <= words
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown


@pytest.mark.parametrize("width", [50, 80, 100, 120])
def test_a_long_name_is_whole(width, monkeypatch):
    """Numbers stand for names where these do not fit."""
    long = "SmolLM2-135M-Instruct-int4-in-groups-by-gptq"
    rows = [row("float", None, None), row(long, 4.28, 2.3641)]
    text = SimpleNamespace(windows=16, tokens=512, source="some text")
    terminal = Console(width=width, record=True)
    monkeypatch.setattr(console, "out", terminal)
    print_comparison(SimpleNamespace(models=rows, text=text, prompt="Why?"), None)
    words = terminal.export_text().split()
    assert words.count(long) == (2 if width == 120 else 1)
    assert words.count("2") == (0 if width == 120 else 3)  # names, figures, answers


def test_names_are_the_ends_of_paths_that_differ():
    names = short_names(["/long/way/model.gguf", "a/int4", "b\\int4/", "owner/int8", "."])
    assert [*names.values()] == ["model.gguf", "a/int4", "b\\int4/", "int8", "."]
