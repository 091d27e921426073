"""``quark schemes``: the names of all schemes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from quark.cli import console
from quark.cli.options import Json, add_verb

HELP = """
List the schemes of [cyan]--quant_scheme[/cyan] and [cyan]--kv_cache_dtype[/cyan].

The columns show the formats of weights, inputs and outputs of every layer.
[cyan]data[/cyan] marks schemes that need calibration text for static ranges. Names that
end in a group size accept any other group size: [cyan]int4_wo_16[/cyan]. The long names of
MX schemes in version 0.8 are accepted too: [cyan]w_mx_fp4_per_group_sym[/cyan] is
[cyan]w_mxfp4[/cyan]. Names of compressed-tensors too: [cyan]W4A16[/cyan],
[cyan]W4A16_ASYM[/cyan], [cyan]W8A16[/cyan], [cyan]W3A16[/cyan], [cyan]W2A16[/cyan],
[cyan]W8A8[/cyan] (int8), [cyan]FP8_DYNAMIC[/cyan], [cyan]NVFP4A16[/cyan], [cyan]MXFP4A16[/cyan].

[bold]Examples[/bold]

    [cyan]quark schemes[/cyan]

    [cyan]quark schemes --json[/cyan]
"""


# Written by scripts/scheme_table.py: making the rows takes torch, which starts slowly.
TABLE = Path(__file__).with_name("schemes.json")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "schemes", schemes, HELP)


def schemes(as_json: Json = False) -> None:
    """Print all schemes of layers and of the key-value cache."""
    tables = json.loads(TABLE.read_text("utf-8"))
    if as_json:
        console.as_json(tables)
        return
    layers, caches = tables["quant_scheme"], tables["kv_cache_dtype"]
    console.out.print("", _current_table([row for row in layers if not _is_earlier(row["name"])]))
    console.out.print(_earlier_table([row for row in layers if _is_earlier(row["name"])]))
    table = console.table("--kv_cache_dtype")
    table.add_column("name")
    table.add_column("cached keys and values")
    for row in caches:
        table.add_row(row["name"], row["kv_cache"])
    console.out.print(table)


def _current_table(rows: list[dict[str, Any]]) -> Table:
    table = console.table("--quant_scheme")
    table.add_column("name", no_wrap=True)
    for column in ("weights", "inputs", "data"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["name"], row["weight"], row["input"], "yes" if row["needs_data"] else "")
    return table


def _earlier_table(rows: list[dict[str, Any]]) -> Table:
    table = console.table("--quant_scheme, names of earlier versions")
    table.add_column("name", no_wrap=True)
    table.add_column("weights, inputs, outputs")
    for row in rows:
        words = (row[tensor] for tensor in ("weight", "input", "output"))
        table.add_row(row["name"], ", ".join(word for word in words if word))
    return table


def _is_earlier(name: str) -> bool:
    return name.startswith("w_")
