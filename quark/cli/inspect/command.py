"""``quark inspect``: how a checkpoint is quantized, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.hub import headers_of
from quark.cli.inspect.structure import as_dict, find_structure, show
from quark.cli.model_files import find_container, find_model, is_hub_name
from quark.cli.options import Json, TrustRemoteCode, add_verb, in_words, panel
from quark.torch.export.formats.registry import FORMATS

if TYPE_CHECKING:
    from quark.torch.export.checkpoint_contents import Contents, Summary
    from quark.torch.quantization.config.description import LayerDescription

HELP = f"""
Show how the layers of a checkpoint are quantized, and their size on disk.

Only [cyan]config.json[/cyan] and the headers of tensor files are read, which takes about a second
for a model of any size, on the Hub too. The input is a float model, a checkpoint of Quark of any
version or of another tool ({in_words([name for name in FORMATS if name != "quark"])}), or a
GGUF file.

Bits per weight include everything that is stored for the weights of quantized layers: codes, scales
and zero points.

[bold]Examples[/bold]

    [cyan]quark inspect my-model-int4[/cyan]

    [cyan]quark inspect my-model-int4 --layers[/cyan]

    [cyan]quark inspect my-model-int4 --json > summary.json[/cyan]

    [cyan]quark inspect my-model --structure[/cyan]

    [cyan]quark inspect my-model-int4 --check[/cyan]
"""

_show = panel("Contents")
Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of the checkpoint, a GGUF file, or OWNER/NAME."),
]
Structure = Annotated[
    bool,
    _show(
        "--structure",
        help="Load a float model, run it on random tokens, and show which layers can be rescaled "
        "or rotated, and why others cannot.",
    ),
]
Layers = Annotated[bool, _show("--layers", help="List every quantized layer.")]
Check = Annotated[
    bool,
    _show(
        "--check",
        help="Compare every file with the digest that was written with it, and tensors with the "
        "model. Exit with 1 if a file has changed or is missing, or a tensor does not fit.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "inspect", inspect, HELP)


def inspect(
    directory: Directory,
    layers: Layers = False,
    structure: Structure = False,
    check: Check = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Print the summary of a checkpoint, the structure of a model, or the state of its files."""
    if check:
        _check(find_model(directory, "DIR"), as_json)
        return
    if structure:
        found = find_structure(find_model(directory, "DIR"), trust_remote_code)
        console.as_json(as_dict(found)) if as_json else show(found)
        return
    if is_hub_name(directory):
        with headers_of(directory.as_posix(), "DIR") as headers:
            contents, on_disk = _read(headers)
    else:
        contents, on_disk = _read(directory)
    summary, note = contents.summary, contents.note
    if as_json:
        facts = {"directory": str(directory), "model_type": contents.model_type}
        console.as_json({**facts, **contents.origin, "note": note, **summary.to_dict()})
        return
    words = [contents.model_type]
    words += [f"{key} {value}" for key, value in contents.origin.items()] or ["not quantized"]
    title = f"\n[bold]{escape(str(directory))}[/]  ({escape(', '.join(words))})"
    console.out.print(title, soft_wrap=True)
    if note:
        console.err.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if layers and summary.layers:
        console.out.print(_layer_table(summary))
    console.out.print(_scheme_table(summary, is_understood=not note))
    if summary.bits_per_weight is not None:
        console.say(
            f"{console.format_bits(summary.bits_per_weight)} bits per weight in the quantized "
            f"layers, {console.format_bits(summary.bits_per_parameter)} per parameter over the "
            "whole model."
        )
    size = console.format_bytes(on_disk)
    if size != console.format_bytes(summary.bytes):
        console.say(f"On disk: {size}, with headers and what else the files hold.")
    console.out.print()


def _check(place: Path, as_json: bool) -> None:
    """Print a table of files; exit with 1 if one has changed or is missing.

    Raises:
        FileNotFoundError: There are no digests.
        ValueError: The list of digests is damaged, or tensors do not fit the model.
    """
    from quark.torch.digests import DIGESTS, compare_digests

    if not place.exists():
        raise console.wrong("DIR", f"there is no {place}. Give a checkpoint.")
    results = compare_digests(place)
    if as_json:
        console.as_json({"directory": str(place), "files": results})
    else:
        table = console.table()
        table.add_column("file", overflow="fold")
        table.add_column(DIGESTS)
        for name, status in results.items():
            colour = {"ok": "green", "not listed": "yellow"}.get(status, "bold red")
            table.add_row(escape(name), f"[{colour}]{status}[/]")
        console.out.print("", table)
    wrong = {"changed", "missing"} if place.is_dir() else {"changed", "missing", "not listed"}
    if wrong & set(results.values()):
        raise typer.Exit(1)
    _check_tensors(place)


def _check_tensors(place: Path) -> None:
    """Check that a model gets all its tensors from a checkpoint, as far as headers tell.

    Raises:
        ValueError: It does not. The message names the tensors.
    """
    from quark.torch.export.recognition import check_checkpoint, recognize_container

    try:
        container = recognize_container(place)
    except FileNotFoundError:  # statistics, or one file of several
        return
    if container.is_read:
        check_checkpoint(place)


def _read(place: Path) -> tuple[Contents, int]:
    """Return what a checkpoint holds, and the bytes of its files with weights.

    Raises:
        typer.BadParameter: There is no checkpoint.
    """
    if not place.exists():
        raise console.wrong(
            "DIR", f"there is no directory {place} and no file of that name. Give a checkpoint."
        )
    container = find_container(place, "DIR")
    if container.has_config_json:
        models.read_config(place, "DIR")
    return container.contents(place), container.size(place)


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
            console.format_count(row.weights) if row.weights else "–",
            console.format_bytes(row.bits // 8) if row.weights else "–",
            console.format_bits(row.bits_per_weight),
        )
    for kind in summary.rest:
        bits = 8 * kind.bytes / kind.parameters if kind.parameters else None
        table.add_row(
            f"not quantized: {kind.dtype}" if is_understood else kind.dtype,
            *blank,
            "",
            console.format_count(kind.parameters),
            console.format_bytes(kind.bytes),
            console.format_bits(bits),
        )
    table.add_section()
    table.add_row(
        "[bold]total[/]",
        *blank,
        str(len(summary.layers)),
        console.format_count(summary.parameters),
        console.format_bytes(summary.bytes),
        console.format_bits(summary.bits_per_parameter),
    )
    return table


_TITLES = {"input": "inputs", "output": "outputs", "kv_cache": "kv cache"}


def _used_columns(schemes: list[LayerDescription]) -> list[str]:
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
            console.format_count(layer.weights) if layer.weights else "–",
            console.format_bits(layer.bits / layer.weights if layer.weights else None),
        )
    return table
