"""The table of a comparison fits a terminal of 80 columns, with whole figures."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from quark.cli.compare.tables import _figure_table
from quark.torch.report.comparison import short_names


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
    return SimpleNamespace(
        name=name,
        bytes=163_400_000,
        bits_per_weight=bits,
        predictions=predictions,
        continuation=SimpleNamespace(tokens_per_second=123.4),
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


def test_names_are_the_ends_of_paths_that_differ():
    names = short_names(["/long/way/model.gguf", "a/int4", "b\\int4/", "owner/int8", "."])
    assert [*names.values()] == ["model.gguf", "a/int4", "b\\int4/", "int8", "."]
