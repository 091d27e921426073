"""Tables break no word: a terminal that is too narrow shows each row as a list."""

import pytest
from rich.console import Console

from quark.cli import console

ROWS = [
    ("int4_wo_128", "int4 per group 128 sym", "awq, gptq, compressed-tensors"),
    ("int8", "int8 per tensor sym", ""),
]


def shown(width, no_wrap=False):
    table = console.table("schemes")
    for head in ("name", "weights of\nlayers", "also/\nas"):
        table.add_column(head, no_wrap=no_wrap)
    for row in ROWS:
        table.add_row(*row)
    terminal = Console(width=width, record=True)
    terminal.print(table)
    return terminal.export_text()


@pytest.mark.parametrize("width", [30, 44, 48, 60, 80, 120])
def test_no_word_is_broken(width):
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    assert {word for row in ROWS for cell in row for word in cell.split()} <= set(text.split())
    assert ("─" in text) == (width > 44)  # the line below the heads of a table


def test_a_row_becomes_its_first_cell_and_a_list_of_figures():
    lines = [line.rstrip() for line in shown(40).splitlines()]
    assert lines == [
        "schemes",
        "  int4_wo_128",
        "    weights of layers int4 per group 128",
        "    sym",
        "    also/as awq, gptq,",
        "    compressed-tensors",
        "  int8",
        "    weights of layers int8 per tensor",
        "    sym",
        "",
    ]


def test_columns_without_line_breaks_need_their_whole_width():
    assert "─" in shown(100, no_wrap=True)
    assert "─" not in shown(70, no_wrap=True)


def test_a_wide_table_is_as_wide_as_its_words():
    assert max(map(len, shown(200).splitlines())) == max(map(len, shown(120).splitlines())) < 80
