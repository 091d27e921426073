"""``quark convert``: the same codes and scales in the layout of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.options import TrustRemoteCode, Verbose, panel

HELP = """
Write a quantized checkpoint again for another tool, with the codes and scales it has.

Nothing is quantized anew: what the other format cannot hold is an error that names the layers,
before any tensor is read. Checkpoints of this package (older ones too), AutoAWQ, GPTQ,
compressed-tensors and fp8 are read, and GGUF files with Q4_0, Q4_1 and Q8_0 weights.

[bold]Examples[/bold]

    [cyan]quark convert llama-awq llama-ct --to compressed-tensors --verify[/cyan]

    [cyan]quark convert llama-gptq llama-gguf --to gguf[/cyan]

    [cyan]quark convert llama.gguf llama-int4 --to quark[/cyan]
"""

_output = panel("Output")
Source = Annotated[
    Path, typer.Argument(metavar="IN", help="Directory of a checkpoint, or a GGUF file.")
]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write.")]
To = Annotated[
    Literal["quark", "awq", "gptq", "compressed-tensors", "fp8", "gguf"],
    _output("--to", metavar="FORMAT", help="quark, awq, gptq, compressed-tensors, fp8 or gguf."),
]
Verify = Annotated[
    bool,
    _output(
        "--verify",
        help="Open the result with the tool it is for, where that is installed, and compare its "
        "predictions with those of the source before it takes its place.",
    ),
]
Overwrite = Annotated[
    bool, _output("--overwrite", help="Replace the output directory, once all went well.")
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("convert", help=HELP)(convert)


def convert(
    source: Source,
    target: Target,
    to: To,
    verify: Verify = False,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
) -> None:
    """Convert a checkpoint and say what came of it."""
    if not source.exists():
        raise console.wrong("IN", f"there is no {source}. Give a checkpoint's directory or file.")
    from quark.torch.export.conversion import convert as write

    with console.stage(f"writing {to}"):
        verdict = write(source, target, to, overwrite, verify, trust_remote_code)
    before = source.stat().st_size if source.is_file() else models.weight_bytes(source)
    after = models.weight_bytes(target)
    rows = {"checkpoint": escape(str(target)), "format": to}
    rows["size on disk"] = f"{console.in_bytes(before)} → {console.in_bytes(after)}"
    if verdict is not None:
        rows["verified"] = escape(str(verdict))
    console.out.print("", console.facts(rows), "", sep="\n")
