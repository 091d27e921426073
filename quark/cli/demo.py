"""``quark demo``: the model that comes with the package, under several schemes side by side."""

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
KEPT = "uint4_wo_128"
PROMPT = "Raise an exception if"
NEW_TOKENS = 24
REPETITION_PENALTY = 1.15  # a model as small as this goes round in circles otherwise

HELP = f"""
Quantize the small model that comes with this package under several schemes.

The table that fills tells for each scheme what it costs (perplexity, the lower the better) and
what it saves. One of the results is written, loaded back through Transformers, and writes a line.
Nothing is downloaded: the model (4 million parameters) has learned from the documentation of
Python's standard library, and is measured on the part of it that it has not seen.

[bold]Examples[/bold]

    [cyan]quark demo[/cyan]

    [cyan]quark demo --schemes fp8,int4_wo_64,int4_wo_32 \\
      --keep int4_wo_32 --output_dir demo-int4[/cyan]

By default: [cyan]{", ".join(SCHEMES)}[/cyan]; [cyan]quark schemes[/cyan] lists all.
"""

_show = panel("What to show")
OutputDir = Annotated[
    Path | None,
    _show(
        "--output_dir",
        metavar="DIR",
        help="Where to write the kept model; a temporary directory otherwise.",
    ),
]
Schemes = Annotated[
    str | None, _show("--schemes", metavar="A,B,C", help="Schemes to compare, with commas between.")
]
Keep = Annotated[
    str | None,
    _show(
        "--keep",
        metavar="NAME",
        help=f"Scheme to write and reload: {KEPT}, or else the last one compared.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("demo", help=HELP)(demo)


def demo(
    output_dir: OutputDir = None,
    schemes: Schemes = None,
    keep: Keep = None,
    verbose: Verbose = False,
) -> None:
    """Compare schemes on the model that comes with the package."""
    start = time.monotonic()
    names, kept = _chosen(schemes, keep)
    if output_dir is not None:
        _check_vacant(output_dir)
    with console.stage("loading the model and the text", spinner=True):
        material = demo_material()
    with tempfile.TemporaryDirectory(prefix="quark-demo-") as temporary:
        directory = output_dir or Path(temporary) / kept
        sample = compare(names, kept, material, directory)
        _reload(kept, material, directory, sample)
    _show_next(kept, output_dir, time.monotonic() - start)


def _chosen(schemes: str | None, keep: str | None) -> tuple[list[str], str]:
    """Return the schemes to compare, and the one to write.

    Raises:
        typer.BadParameter: One is unknown, or what to write is not compared.
    """
    given = SCHEMES if schemes is None else schemes.split(",")
    names = list(dict.fromkeys(name.strip() for name in given))
    for name in names:
        layer_scheme("--schemes", name)
    if keep is None:
        keep = KEPT if KEPT in names else names[-1]
    if keep not in names:
        raise console.wrong("--keep", f"{keep!r} is not among the schemes: {', '.join(names)}.")
    return names, keep


def _check_vacant(directory: Path) -> None:
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise console.wrong("--output_dir", f"{directory} exists and is in use. Choose another.")


def _reload(kept: str, material: Material, directory: Path, sample: torch.Tensor) -> None:
    """Load the written model back, compare it with what was written, and let it write a line."""
    import torch

    with console.stage("loading it back through Transformers", spinner=True):
        model = models.load_model(directory)
    same = torch.equal(logits(model, material), sample)
    console.say(
        f"[bold]{kept}[/] was written and loaded back through Transformers. Its outputs are "
        + ("the same, bit for bit." if same else "[bold red]not the same[/]: please report this.")
    )
    console.say("Both models go on from the same words:\n")
    lines = {ORIGINAL: material.model, kept: model}
    console.out.print(
        console.facts({name: escape(_line(m, material.tokenizer)) for name, m in lines.items()})
    )


def _line(model: Any, tokenizer: Any) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(
        **inputs,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        repetition_penalty=REPETITION_PENALTY,
    )
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return " ".join(text.split())


def _show_next(kept: str, output_dir: Path | None, seconds: float) -> None:
    where = f"It is in {output_dir}." if output_dir else "--output_dir DIR keeps what was written."
    console.say(
        f"\nDone in {seconds:.0f} s. Lower perplexity is better; large models lose much less than "
        f"one as small as this. {escape(where)} With a model of yours:\n"
    )
    console.show_code(
        f"quark quantize --model_dir MODEL --output_dir OUTPUT --quant_scheme {kept}",
        "quark inspect OUTPUT",
    )
    console.out.print()
