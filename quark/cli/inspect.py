"""``quark inspect``: what is quantized how, from the headers of a checkpoint alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.options import Json, Verbose, panel
from quark.cli.structure import as_dict, find_structure, show

if TYPE_CHECKING:
    from quark.torch.export.checkpoint_contents import Part
    from quark.torch.report.summary import Scheme, Summary

HELP = """
Show what is quantized how in a checkpoint, and what it takes on disk.

Only [cyan]config.json[/cyan] and the headers of the files of tensors are read, so this takes a
second however large the model is. Float models, checkpoints of earlier versions, those of AWQ,
GPTQ, compressed-tensors and fp8, and GGUF files are fine.

Bits per weight count everything stored for the weights of quantized layers: codes, scales and
zero points.

[bold]Examples[/bold]

    [cyan]quark inspect my-model-int4[/cyan]

    [cyan]quark inspect my-model-int4 --layers[/cyan]

    [cyan]quark inspect my-model-int4 --json > summary.json[/cyan]

    [cyan]quark inspect my-model --structure[/cyan]
"""

_show = panel("What to show")
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of the checkpoint, or a GGUF file.")
]
Structure = Annotated[
    bool,
    _show(
        "--structure",
        help="Load a float model, run a few random tokens, and show what can be rescaled and "
        "rotated in it, and what cannot and why.",
    ),
]
Layers = Annotated[bool, _show("--layers", help="List every quantized layer.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("inspect", help=HELP)(inspect)


def inspect(
    directory: Directory,
    layers: Layers = False,
    structure: Structure = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print the summary of a checkpoint, or the structure of a model."""
    if structure:
        found = find_structure(directory)
        console.as_json(as_dict(found)) if as_json else show(found)
        return
    described, summary, note = _read(directory)
    origin = _origin(described)
    if as_json:
        facts = {"directory": str(directory), "model_type": described.get("model_type"), **origin}
        console.as_json({**facts, "note": note, **summary.to_dict()})
        return
    words = [str(described.get("model_type", "unknown type"))]
    words += [f"{key} {value}" for key, value in origin.items()] or ["not quantized"]
    title = f"\n[bold]{escape(str(directory))}[/]  ({escape(', '.join(words))})"
    console.out.print(title, soft_wrap=True)
    if note:
        console.err.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if layers:
        console.out.print(_layer_table(summary))
    console.out.print(_scheme_table(summary, is_understood=not note))
    if summary.bits_per_weight is not None:
        console.say(
            f"{console.in_bits(summary.bits_per_weight)} bits per weight in the quantized layers, "
            f"{console.in_bits(summary.bits_per_parameter)} per parameter over the whole model."
        )
    console.out.print()


def _read(place: Path) -> tuple[dict[str, Any], Summary, str]:
    """Return what a checkpoint says of itself, what it holds, and what is not told apart."""
    from quark.torch.export.checkpoint.files import CheckpointReader
    from quark.torch.export.checkpoint.reader import format_of
    from quark.torch.export.checkpoint_contents import contents, gguf_contents
    from quark.torch.export.gguf.reader import GgufFile

    files = [place] if place.is_file() else sorted(place.glob("*.gguf"))
    if len(files) == 1 and not (place / "config.json").is_file():
        file = GgufFile(files[0])
        method = {"quant_method": "gguf", "version": file.version}
        kind = file.values.get("general.architecture", "unknown type")
        described = {"model_type": kind, "quantization_config": method}
        return described, _summary(gguf_contents(file)), ""
    described = models.read_config(place, "DIR")
    section = described.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method", "quark") != "quark":
        try:
            fmt = format_of(described, str(place / "config.json"))
        except ValueError:
            return described, *models.read_summary(place)  # which says why
        return described, _summary(contents(CheckpointReader(place).entries, fmt)), ""
    return described, *models.read_summary(place)


def _summary(parts: list[Part]) -> Summary:
    from quark.torch.report.summary import (
        LayerSummary,
        Scheme,
        Summary,
        TypeSummary,
        describe_layer,
    )

    layers, rest = [], dict[str, list[Any]]()
    for part in parts:
        if part.is_layer:
            kind = part.kind
            scheme = (
                Scheme(weight=kind)
                if isinstance(kind, str)
                else describe_layer(kind, is_cache=True)
            )
            layers.append(LayerSummary(part.name, scheme, part.elements, 8 * part.bytes))
        else:
            rest.setdefault(str(part.kind), []).append(part)
    kinds = [
        TypeSummary(kind, len(found), sum(x.elements for x in found), sum(x.bytes for x in found))
        for kind, found in sorted(rest.items())
    ]
    return Summary(tuple(layers), tuple(kinds), sum(part.all_bytes for part in parts))


def _origin(described: dict[str, Any]) -> dict[str, Any]:
    """Return how the checkpoint says it was quantized, nothing for a float model."""
    section = described.get("quantization_config")
    if not isinstance(section, dict):
        return {}
    export = section.get("export")
    export = export if isinstance(export, dict) else {}
    said = {
        "quant_method": section.get("quant_method", "quark"),
        "version": section.get("version"),
        "weight_format": export.get("weight_format"),
        "pack_method": export.get("pack_method"),
    }
    return {key: value for key, value in said.items() if value is not None}


def _scheme_table(summary: Summary, is_understood: bool) -> Any:
    schemes = summary.schemes()
    used = _used_columns([row.scheme for row in schemes])
    table = console.table()
    table.add_column("weights", no_wrap=True)
    for column in used:
        table.add_column(_TITLES[column])
    for column in ("layers", "parameters", "size", "bits/weight"):
        table.add_column(column, justify="right", no_wrap=True)
    blank = [""] * len(used)
    for row in schemes:
        table.add_row(
            row.scheme.weight or "–",
            *(getattr(row.scheme, column) or "–" for column in used),
            str(row.layers),
            console.in_count(row.weights) if row.weights else "–",
            console.in_bytes(row.bits // 8) if row.weights else "–",
            console.in_bits(row.bits_per_weight),
        )
    for kind in summary.rest:
        bits = 8 * kind.bytes / kind.parameters if kind.parameters else None
        table.add_row(
            f"not quantized: {kind.dtype}" if is_understood else kind.dtype,
            *blank,
            "",
            console.in_count(kind.parameters),
            console.in_bytes(kind.bytes),
            console.in_bits(bits),
        )
    table.add_section()
    table.add_row(
        "[bold]total[/]",
        *blank,
        str(len(summary.layers)),
        console.in_count(summary.parameters),
        console.in_bytes(summary.bytes),
        console.in_bits(summary.bits_per_parameter),
    )
    return table


_TITLES = {"input": "inputs", "output": "outputs", "kv_cache": "kv cache"}


def _used_columns(schemes: list[Scheme]) -> list[str]:
    return [column for column in _TITLES if any(getattr(scheme, column) for scheme in schemes)]


def _layer_table(summary: Summary) -> Any:
    used = _used_columns([layer.scheme for layer in summary.layers])
    table = console.table()
    table.add_column("layer", no_wrap=True)
    table.add_column("weights")
    for column in used:
        table.add_column(_TITLES[column])
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("bits/weight", justify="right", no_wrap=True)
    for layer in summary.layers:
        table.add_row(
            escape(layer.name),
            layer.scheme.weight or "–",
            *(getattr(layer.scheme, column) or "–" for column in used),
            console.in_count(layer.weights) if layer.weights else "–",
            console.in_bits(layer.bits / layer.weights if layer.weights else None),
        )
    return table
