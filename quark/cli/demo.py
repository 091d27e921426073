"""``quark demo``: the shipped model under several schemes, side by side."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.comparison import ORIGINAL, Material, compare, demo_material, logits
from quark.cli.options import Verbose, panel
from quark.cli.outputs import check_directory, check_file
from quark.cli.quantize.config import layer_scheme

if TYPE_CHECKING:
    import torch

SCHEMES = (
    "fp8",
    "ptpc_fp8",
    "int8",
    "ptpc_int8",
    "int4_wo_32",
    "int4_wo_128",
    "uint4_wo_128",
    "int3_wo_128",
    "int2_wo_32",
)
EXPORTED = "uint4_wo_128"
PROMPT = "Raise an exception if"
NEW_TOKENS = 24
REPETITION_PENALTY = 1.15  # small models repeat themselves without it

HELP = f"""
Quantize the small model of this package under several schemes.

The table shows the perplexity (lower is better) and the size under each
scheme. Then one result is exported and loaded with Transformers, and
generates a line of text. Nothing is downloaded. The model (4 million
parameters) was trained on the documentation of Python's standard library, and
is measured on a held-out part of it.

[bold]Examples[/bold]

    [cyan]quark demo[/cyan]

    [cyan]quark demo --schemes fp8,int4_wo_64,int4_wo_32 \\
      --keep int4_wo_32 --output_dir demo-int4[/cyan]

Default schemes: [cyan]{", ".join(SCHEMES)}[/cyan]; [cyan]quark schemes[/cyan] lists all schemes.
"""

_show = panel("Comparison")
OutputDir = Annotated[
    Path | None,
    _show(
        "--output_dir",
        metavar="DIR",
        help="Directory of the exported model (default: a temporary directory).",
    ),
]
Schemes = Annotated[
    str | None, _show("--schemes", metavar="A,B,C", help="Schemes to compare, separated by commas.")
]
Keep = Annotated[
    str | None,
    _show(
        "--keep",
        metavar="NAME",
        help=f"Scheme to export and load (default: {EXPORTED}, or the last one if not compared).",
    ),
]
Picture = Annotated[
    Path | None,
    _show("--picture", metavar="FILE", help="SVG of loss over size to write."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("demo", help=HELP)(demo)


def demo(
    output_dir: OutputDir = None,
    schemes: Schemes = None,
    keep: Keep = None,
    picture: Picture = None,
    verbose: Verbose = False,
) -> None:
    """Compare schemes on the shipped model."""
    start = time.monotonic()
    names, exported = _parse_names(schemes, keep)
    if output_dir is not None:
        _check_vacant(output_dir)
    if picture is not None:
        check_file("--picture", picture, overwrite=False)
    with console.stage("loading the model and the text", spinner=True):
        material = demo_material()
    with tempfile.TemporaryDirectory(prefix="quark-demo-") as temporary:
        directory = output_dir or Path(temporary) / exported
        comparison = compare(names, exported, material, directory)
        _reload(exported, material, directory, comparison.logits)
    if picture is not None:
        _draw(picture, comparison.losses)
    _show_next(exported, output_dir, time.monotonic() - start)


def _parse_names(schemes: str | None, keep: str | None) -> tuple[list[str], str]:
    """Return the schemes to compare, and the scheme to export.

    Raises:
        typer.BadParameter: A scheme is unknown, or the one to export is not compared.
    """
    given = SCHEMES if schemes is None else schemes.split(",")
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        layer_scheme("--schemes", name)
    if keep is None:
        keep = EXPORTED if EXPORTED in names else names[-1]
    if keep not in names:
        raise console.wrong("--keep", f"{keep!r} is not among the schemes: {', '.join(names)}.")
    return names, keep


def _check_vacant(directory: Path) -> None:
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise console.wrong("--output_dir", f"{directory} exists and is in use. Choose another.")
    check_directory("--output_dir", directory, overwrite=False)


def _reload(exported: str, material: Material, directory: Path, sample: torch.Tensor) -> None:
    """Load the exported model, compare its logits with ``sample``, and generate a line."""
    import torch

    with console.stage("loading the result with Transformers", spinner=True):
        model = models.load_model(directory)
    same = torch.equal(logits(model, material), sample)
    console.say(
        f"[bold]{exported}[/] was exported and loaded with Transformers. Its outputs are "
        + ("the same, bit for bit." if same else "[bold red]not the same[/]: please report this.")
    )
    console.say("Both models continue the same words:\n")
    lines = {ORIGINAL: material.model, exported: model}
    console.out.print(
        console.facts(
            {name: escape(_generate_line(m, material.tokenizer)) for name, m in lines.items()}
        )
    )


def _generate_line(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
    )
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return " ".join(text.split())


def _draw(path: Path, losses: dict[str, tuple[float, float]]) -> None:
    """Write a picture of the losses."""
    from quark.torch.files import write_text
    from quark.torch.search.chart import render_chart

    try:
        image = render_chart((), losses, "increase of perplexity, %")
    except ValueError as error:
        raise console.wrong("--picture", f"{error} Compare schemes with fewer bits.") from None
    write_text(path, image)


def _show_next(exported: str, output_dir: Path | None, seconds: float) -> None:
    where = (
        f"The result is in {output_dir}." if output_dir else "--output_dir DIR keeps the result."
    )
    console.say(
        f"\nDone in {seconds:.0f} s. Lower perplexity is better. Larger models lose much less than "
        f"this small one. {escape(where)} With your own model:\n"
    )
    console.show_code(
        f"quark quantize --model_dir MODEL --output_dir OUTPUT --quant_scheme {exported}",
        "quark inspect OUTPUT",
    )
    console.out.print()
