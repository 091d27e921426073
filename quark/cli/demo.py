"""``quark demo``: the model that comes with the package, under several schemes side by side."""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from quark.cli import console, models
from quark.cli.options import EVAL_WINDOWS, SEQ_LEN, Verbose, panel

if TYPE_CHECKING:
    import torch
    from torch import nn

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
ORIGINAL = "original"
CALIBRATION_WINDOWS = 8
PROMPT = "Return the"
NEW_TOKENS = 40

HELP = f"""
Quantize the small model that comes with this package under several schemes.

The table that fills tells for each scheme what it costs (perplexity, the lower the better) and
what it saves. One of the results is written, loaded back through Transformers, and writes a line.
Nothing is downloaded: the model (4 million parameters) has learned from the documentation of
Python's standard library, and is measured on the part of it that it has not seen.

[bold]Examples[/bold]

    [cyan]quark demo[/cyan]

    [cyan]quark demo --schemes fp8,int4_wo_64,int4_wo_32 --keep int4_wo_32 --output_dir demo-int4[/cyan]

By default: [cyan]{", ".join(SCHEMES)}[/cyan]; [cyan]quark schemes[/cyan] lists all.
"""  # noqa: E501 - a command is not broken

_show = panel("What to show")
OutputDir = Annotated[
    Path | None,
    _show("--output_dir", help="Where to write the kept model; a temporary directory otherwise."),
]
Schemes = Annotated[
    str | None, _show("--schemes", help="Schemes to compare, with commas between.")
]
Keep = Annotated[
    str | None,
    _show("--keep", help=f"Scheme to write and reload: {KEPT}, or else the last one compared."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("demo", help=HELP)(demo)


@dataclass
class _Row:
    """One scheme: its figures as far as they are known."""

    scheme: str
    bits: str = ""
    size: str = ""
    perplexity: float | None = None
    seconds: str = ""


def demo(
    output_dir: OutputDir = None,
    schemes: Schemes = None,
    keep: Keep = None,
    verbose: Verbose = False,
) -> None:
    """Compare schemes on the model that comes with the package."""
    names, kept = _chosen(schemes, keep)
    if output_dir is not None and output_dir.exists():
        if not output_dir.is_dir() or any(output_dir.iterdir()):
            raise console.wrong("--output_dir", f"{output_dir} is in use. Choose another one.")
    original, tokenizer, calibration, evaluation = _prepare()
    ...
