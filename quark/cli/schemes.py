"""``quark schemes``: the names of all schemes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from quark.cli import console
from quark.cli.console import wrong
from quark.cli.options import Json, add_verb

HELP = """
List the schemes of [cyan]--quant_scheme[/cyan] and [cyan]--kv_cache_dtype[/cyan].

Without [cyan]PART[/cyan] and [cyan]--all[/cyan], the schemes that most models are quantized with.
[cyan]bits[/cyan] are those of a stored weight with its scales and zero points; for the types of
GGUF files, such as q4_k, those of its blocks there.
[cyan]data[/cyan] marks schemes that need calibration text for static ranges.
[cyan]also as[/cyan] names the layouts of [cyan]--custom_mode[/cyan] that hold a scheme, and
[cyan]gguf[/cyan] and [cyan]onnx[/cyan] of [cyan]--model_export[/cyan]. GGUF files hold few
integers in blocks of more bits.

Names that end in a group size accept any other group size: [cyan]int4_wo_16[/cyan].
The long names of MX schemes in version 0.8 are accepted too:
[cyan]w_mx_fp4_per_group_sym[/cyan] is [cyan]w_mxfp4[/cyan]. So are names of compressed-tensors:
[cyan]W4A16[/cyan], [cyan]W4A16_ASYM[/cyan], [cyan]W8A16[/cyan], [cyan]W3A16[/cyan],
[cyan]W2A16[/cyan], [cyan]W8A8[/cyan] (int8), [cyan]FP8_DYNAMIC[/cyan], [cyan]NVFP4A16[/cyan],
[cyan]MXFP4A16[/cyan].

[bold]Examples[/bold]

    [cyan]quark schemes[/cyan]

    [cyan]quark schemes int4[/cyan]

    [cyan]quark schemes --all[/cyan]

    [cyan]quark schemes --json[/cyan]
"""


# Written by scripts/scheme_table.py: making the rows takes torch, which starts slowly.
TABLE = Path(__file__).with_name("schemes.json")
OWN_LAYOUT = "quark"  # which holds every scheme
# The schemes of most models, from many bits to few.
COMMON = (
    *("int8_wo", "int8", "ptpc_int8"),
    *("fp8", "ptpc_fp8", "mxfp8", "mxfp6_e2m3"),
    *("uint4_wo_32", "int4_wo_128", "uint4_wo_128", "nvfp4", "q4_k", "mxfp4"),
    *("int3_wo_128", "int2_wo_64"),
)
_CLIENTS = (
    "Who runs which file: Transformers and vLLM the layout of Quark, compressed-tensors and fp8; "
    "vLLM and SGLang awq, gptq and modelopt; llama.cpp gguf; ONNX Runtime onnx; mlx-lm mlx. "
    "docs/serving.md tells the schemes of each."
)
Part = Annotated[
    str,
    typer.Argument(metavar="PART", show_default=False, help="List all names with this part."),
]
ShowAll = Annotated[bool, typer.Option("--all", rich_help_panel="Other", help="List every scheme.")]


def listed_schemes(flag: str) -> list[str]:
    """Return the names of the schemes of a flag: ``quant_scheme`` or ``kv_cache_dtype``."""
    table: dict[str, list[dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return [row["name"] for row in table[flag]]


def schemes_of(layout: str) -> list[str]:
    """Return the names of the schemes that a layout holds, usual ones of few bits first.

    Args:
        layout: Value of ``--custom_mode``, or ``gguf`` or ``onnx``.
    """
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["quant_scheme"]
    names = [row["name"] for row in rows if layout in _holders(row)]
    usual = [name for name in ("int4_wo_128", *COMMON) if name in names]
    return [*dict.fromkeys([*usual, *names])]


def files_of_layer(weight: str, input: str) -> set[str]:
    """Return the layouts and files that hold a layer; empty if no listed scheme is like it.

    Args:
        weight: Its weight in words, as ``describe_layer`` has them.
        input: Its input, likewise.
    """
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["quant_scheme"]
    alike = [row for row in rows if (row["weight"], row["input"]) == (weight, input)]
    return {name for row in alike for name in _holders(row)}


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "schemes", schemes, HELP)


def schemes(part: Part = "", show_all: ShowAll = False, as_json: Json = False) -> None:
    """Print the schemes of layers and of the key-value cache.

    Raises:
        typer.BadParameter: No name has the part.
    """
    tables = json.loads(TABLE.read_text("utf-8"))
    if part:
        for flag, rows in tables.items():
            tables[flag] = [row for row in rows if part.lower() in row["name"]]
        if not any(tables.values()):
            raise wrong("PART", f"no scheme has {part!r} in its name. Give less of it, or --all.")
    if as_json:
        console.as_json(tables)
        return
    layers, caches = tables["quant_scheme"], tables["kv_cache_dtype"]
    if not show_all and not part:
        known = {row["name"]: row for row in layers}
        console.out.print("", _current_table([known[name] for name in COMMON]))
        names = ", ".join(row["name"] for row in caches)
        console.say(
            f"[bold]--kv_cache_dtype[/]: {names}\n\n"
            f"{_CLIENTS}\n\n"
            f"{len(layers) - len(COMMON)} other schemes: [cyan]quark schemes --all[/]\n"
        )
        return
    current = [row for row in layers if not _is_earlier(row["name"])]
    earlier = [row for row in layers if _is_earlier(row["name"])]
    console.out.print()
    tables_of = {_current_table: current, _earlier_table: earlier, _cache_table: caches}
    for make, rows in tables_of.items():
        if rows:
            console.out.print(make(rows))


def _current_table(rows: list[dict[str, Any]]) -> Table:
    table = console.table("--quant_scheme")
    table.add_column("name", no_wrap=True)
    table.add_column("bits", justify="right")
    for column in ("weights", "inputs", "data", "also as"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["name"],
            f"{_bits(row):.2f}",
            row["weight"],
            row["input"],
            "yes" if row["needs_data"] else "",
            ", ".join(_other_files(row)),
        )
    return table


def _bits(row: dict[str, Any]) -> float:
    """Return the bits of a weight; of blocks where the scheme is named like them."""
    blocks = row["gguf"]
    is_named_so = blocks is not None and blocks["type"].lower() == row["name"]
    return float(blocks["bits"] if is_named_so else row["bits"])


def _holders(row: dict[str, Any]) -> Iterator[str]:
    """Iterate over the layouts and files that hold a scheme; GGUF files in more bits too."""
    yield from row["layouts"]
    yield from (name for name in ("gguf", "onnx") if row[name])


def _other_files(row: dict[str, Any]) -> Iterator[str]:
    """Iterate over what holds a scheme beside the layout of Quark."""
    yield from (name for name in row["layouts"] if name != OWN_LAYOUT)
    blocks = row["gguf"]
    if blocks is not None:
        yield "gguf" if blocks["bits"] < _bits(row) + 0.5 else f"gguf ({blocks['bits']:g} bits)"
    if row["onnx"]:
        yield "onnx"


def _earlier_table(rows: list[dict[str, Any]]) -> Table:
    table = console.table("--quant_scheme, names of earlier versions")
    table.add_column("name", no_wrap=True)
    table.add_column("weights, inputs, outputs")
    for row in rows:
        words = (row[tensor] for tensor in ("weight", "input", "output"))
        table.add_row(row["name"], ", ".join(word for word in words if word))
    return table


def _cache_table(rows: list[dict[str, Any]]) -> Table:
    table = console.table("--kv_cache_dtype")
    table.add_column("name")
    table.add_column("cached keys and values")
    for row in rows:
        table.add_row(row["name"], row["kv_cache"])
    return table


def _is_earlier(name: str) -> bool:
    return name.startswith("w_")
