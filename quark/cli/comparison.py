"""One model under several schemes, side by side in a table that fills."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.table import Table

from quark.cli import console, models
from quark.cli.options import SEQ_LEN
from quark.cli.quantize.config import excluding_head, layer_scheme

if TYPE_CHECKING:
    import torch
    from torch import nn

ORIGINAL = "original"
WINDOWS = 8  # of text, to calibrate on and to evaluate on


@dataclass
class _Row:
    """One scheme: its figures, as far as they are known."""

    scheme: str
    bits: str = ""
    size: str = ""
    perplexity: float | None = None
    seconds: str = ""


@dataclass(frozen=True)
class Material:
    """What all schemes are given: the same model and the same text."""

    model: nn.Module
    tokenizer: Any
    calibration: list[torch.Tensor]
    evaluation: torch.Tensor


def demo_material() -> Material:
    """Return the model that comes with the package, and text for it."""
    import torch

    from quark.demo.text import model_directory

    torch.set_num_threads(1)  # on a model this small, threads mostly wait for each other
    tokenizer = models.load_tokenizer(model_directory(), "model")
    text = [
        models.text_windows(None, "text", tokenizer, SEQ_LEN, WINDOWS, held_out)
        for held_out in (False, True)
    ]
    model = models.load_model(model_directory())
    return Material(model, tokenizer, [text[0]], text[1])


def compare(names: list[str], kept: str, material: Material, directory: Path) -> torch.Tensor:
    """Fill the table, write the kept scheme, and return its logits for a window of text."""
    original, *rows = [_Row(name) for name in (ORIGINAL, *names)]
    sample: torch.Tensor | None = None
    with _growing_table([original, *rows]) as show:
        show()
        _measure_original(original, material)
        for row in rows:
            show()
            model = _quantize(row, material)
            show()
            if row.scheme == kept:
                _export(model, material.tokenizer, directory)
                sample = logits(model, material)
            row.perplexity = _perplexity(model, material)
        show()
    assert sample is not None
    return sample


def _measure_original(row: _Row, material: Material) -> None:
    from quark.torch.report.summary import summarize

    summary = summarize(material.model.state_dict())
    row.bits = console.in_bits(summary.bits_per_parameter)
    row.size = console.in_bytes(summary.bytes)
    row.perplexity = _perplexity(copy.deepcopy(material.model), material)


def _quantize(row: _Row, material: Material) -> nn.Module:
    """Return a copy of the model quantized by the scheme of a row, which is filled."""
    from quark.torch.export.checkpoint.writer import collect, make_format
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
    row.seconds = f"{time.monotonic() - start:.1f} s"
    stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(stored, config, type_name(next(material.model.parameters()).dtype))
    row.bits, row.size = console.in_bits(summary.bits_per_weight), console.in_bytes(summary.bytes)
    return model


def _perplexity(model: nn.Module, material: Material) -> float:
    """Return the perplexity, computed in float32: many processors are slow at narrower types.

    The model is converted in place. Weights keep their values.
    """
    from quark.torch.evaluation.perplexity import perplexity

    return perplexity(model.float(), material.evaluation)


def _export(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    from quark.torch.export.api import export_safetensors

    export_safetensors(model, directory, tokenizer=tokenizer)


def logits(model: nn.Module, material: Material) -> torch.Tensor:
    """Return the logits of a model for the first window of text, (1, length, vocabulary)."""
    import torch

    with torch.inference_mode():
        found: torch.Tensor = model(material.evaluation[:1]).logits
    return found


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
            console.out.print(_table(rows))
        lines = captured.get().rstrip().splitlines()
        known = len(lines) - sum(row.perplexity is None for row in rows)
        if known > printed:
            console.out.print("\n".join(lines[printed:known]), markup=False, soft_wrap=True)
            printed = known

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
    table.add_column("scheme", no_wrap=True)
    for column in ("bits/weight", "size", "perplexity", "change", "quantized in"):
        table.add_column(column, justify="right", min_width=10, no_wrap=True)
    reference = rows[0].perplexity
    for row in rows:
        change = ""
        if row.perplexity is not None and reference is not None and row.scheme != ORIGINAL:
            change = console.in_percent(row.perplexity, reference)
        perplexity = "" if row.perplexity is None else f"{row.perplexity:.2f}"
        table.add_row(row.scheme, row.bits, row.size, perplexity, change, row.seconds)
    return table
