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
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quark.cli import console, models
from quark.cli.options import EVAL_WINDOWS, SEQ_LEN, Verbose, panel
from quark.cli.request import excluding_head, layer_scheme

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


@dataclass
class _Row:
    """One scheme: its figures, as far as they are known."""

    scheme: str
    bits: str = "…"
    size: str = "…"
    perplexity: float | None = None
    seconds: str = "…"


@dataclass(frozen=True)
class _Material:
    """What all schemes are given: the same model and the same text."""

    model: nn.Module
    tokenizer: Any
    calibration: list[torch.Tensor]
    evaluation: torch.Tensor


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
        material = _material()
    with tempfile.TemporaryDirectory(prefix="quark-demo-") as temporary:
        directory = output_dir or Path(temporary) / kept
        sample = _compare(names, kept, material, directory)
        _reload(kept, material, directory, sample)
    _show_next(kept, output_dir, time.monotonic() - start)


def _chosen(schemes: str | None, keep: str | None) -> tuple[list[str], str]:
    """Return the schemes to compare, and the one to write.

    Raises:
        typer.BadParameter: One is unknown, or what to write is not compared.
    """
    names = [name.strip() for name in schemes.split(",")] if schemes is not None else list(SCHEMES)
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


def _material() -> _Material:
    from quark.demo.text import model_directory

    tokenizer = models.load_tokenizer(model_directory(), "model")
    text = [
        models.text_windows(None, "text", tokenizer, SEQ_LEN, limit, held_out)
        for limit, held_out in ((CALIBRATION_WINDOWS, False), (EVAL_WINDOWS, True))
    ]
    model = models.load_model(model_directory())
    return _Material(model, tokenizer, list(text[0].split(1)), text[1])


def _compare(names: list[str], kept: str, material: _Material, directory: Path) -> torch.Tensor:
    """Fill the table, write the kept scheme, and return its logits for a window of text."""
    rows = [_Row(ORIGINAL)]
    sample: torch.Tensor | None = None
    with _growing_table(rows) as show:
        show()
        _measure_original(rows[0], material)
        for name in names:
            rows.append(_Row(name))
            show()
            model = _quantize(rows[-1], material)
            if name == kept:
                _export(model, material.tokenizer, directory)
                sample = _logits(model, material)
            rows[-1].perplexity = _perplexity(model, material)
        show()
    assert sample is not None
    return sample


def _measure_original(row: _Row, material: _Material) -> None:
    from quark.torch.report.summary import summarize

    summary = summarize(material.model.state_dict())
    row.bits = console.in_bits(summary.bits_per_parameter)
    row.size, row.seconds = console.in_bytes(summary.bytes), ""
    row.perplexity = _perplexity(copy.deepcopy(material.model), material)


def _quantize(row: _Row, material: _Material) -> nn.Module:
    """Return a copy of the model quantized by the scheme of a row, which is filled."""
    from quark.torch.export.writer import collect, make_format
    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.export import JsonExporterConfig
    from quark.torch.report.summary import summarize, type_name

    model = copy.deepcopy(material.model)
    config = Config(global_quant_config=layer_scheme("--schemes", row.scheme))
    config = excluding_head(config, model)
    start = time.monotonic()
    model = ModelQuantizer(config).quantize_model(model, material.calibration)
    model = ModelQuantizer.freeze(model)
    row.seconds = f"{time.monotonic() - start:.1f}"
    stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(stored, config, type_name(material.model.dtype))
    row.bits, row.size = console.in_bits(summary.bits_per_weight), console.in_bytes(summary.bytes)
    return model


def _perplexity(model: nn.Module, material: _Material) -> float:
    """Return the perplexity, computed in float32: many processors are slow at narrower types.

    The model is converted in place. Weights keep their values.
    """
    from quark.torch.evaluation.perplexity import perplexity

    return perplexity(model.float(), material.evaluation)


def _export(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    from quark.torch.export.api import export_safetensors

    export_safetensors(model, directory, tokenizer=tokenizer)


def _logits(model: nn.Module, material: _Material) -> torch.Tensor:
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(material.evaluation[:1]).logits
    return logits


def _reload(kept: str, material: _Material, directory: Path, sample: torch.Tensor) -> None:
    """Load the written model back, compare it with what was written, and let it write a line."""
    import torch

    with console.stage("loading it back through Transformers", spinner=True):
        model = models.load_model(directory)
    same = torch.equal(_logits(model, material), sample)
    console.say(
        f"[bold]{kept}[/] was written and loaded back through Transformers. Its outputs are "
        + ("the same, bit for bit." if same else "[bold red]not the same[/]: please report this.")
    )
    console.say("Both models go on from the same words:\n")
    lines = {ORIGINAL: material.model, kept: model}
    texts = {name: Text(_line(m, material.tokenizer)) for name, m in lines.items()}
    console.out.print(console.facts(texts))


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


@contextmanager
def _growing_table(rows: list[_Row]) -> Iterator[Callable[[], None]]:
    """Give a function that shows the rows as they are now: in place, or line after line."""
    if console.out.is_terminal:
        with Live(_table(rows), console=console.out) as live, redirect_stderr(_Plain(sys.stderr)):
            yield lambda: live.update(_table(rows), refresh=True)
        return
    printed = 0

    def show() -> None:
        nonlocal printed
        with console.out.capture() as captured:
            console.out.print(_table([row for row in rows if row.perplexity is not None]))
        lines = captured.get().rstrip().splitlines()
        console.out.print("\n".join(lines[printed:]), markup=False, soft_wrap=True)
        printed = len(lines)

    yield show
    console.out.print()


class _Plain:
    """A stream that is no terminal, so that no progress bars are drawn into the table."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _table(rows: list[_Row]) -> Table:
    table = console.table()
    table.add_column("scheme", min_width=14, no_wrap=True)
    for column in ("bits/weight", "size", "perplexity", "change", "quantized in"):
        table.add_column(column, justify="right", min_width=10, no_wrap=True)
    reference = rows[0].perplexity if rows else None
    for row in rows:
        change = ""
        if row.perplexity is not None and reference is not None and row is not rows[0]:
            change = console.in_percent(row.perplexity, reference)
        table.add_row(
            row.scheme,
            row.bits,
            row.size,
            "…" if row.perplexity is None else f"{row.perplexity:.2f}",
            change,
            f"{row.seconds} s" if row.seconds else "",
        )
    return table
