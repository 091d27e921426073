"""One model under several schemes, in a table that is filled row by row."""

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

from quark.cli import console
from quark.cli.demo.material import ORIGINAL, Material
from quark.cli.quantize.config import layer_scheme

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass
class Row:
    """The figures of one scheme; None for those that are not known yet."""

    scheme: str
    bits: float | None = None
    bytes: int | None = None
    perplexity: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """What a comparison leaves.

    Attributes:
        logits: Logits of the exported scheme for a window of text.
        rows: Figures of the original and of each scheme.
    """

    logits: torch.Tensor
    rows: list[Row]

    @property
    def losses(self) -> dict[str, tuple[float, float]]:
        """Scheme with quantized weights -> bits per weight, increase of perplexity in percent."""
        original, *rows = self.rows
        return {
            row.scheme: (row.bits, 100 * (row.perplexity / original.perplexity - 1))
            for row in rows
            if row.bits is not None and row.perplexity and original.perplexity
        }


def compare(names: list[str], exported: str, material: Material, directory: Path) -> Comparison:
    """Fill the table, and export one scheme."""
    original, *rows = [Row(name) for name in (ORIGINAL, *names)]
    sample: torch.Tensor | None = None
    with _live_table([original, *rows]) as show:
        show()
        _measure_original(original, material)
        for row in rows:
            show()
            model = _quantize(row, material)
            show()
            if row.scheme == exported:
                _export(model, material.tokenizer, directory)
                sample = material.logits(model)
            row.perplexity = _perplexity(model, material)
        show()
    assert sample is not None
    return Comparison(sample, [original, *rows])


def _measure_original(row: Row, material: Material) -> None:
    from quark.torch.export.checkpoint_contents import summarize

    # A tensor that two modules share is stored once.
    tensors = {t.data_ptr(): (name, t) for name, t in material.model.state_dict().items()}
    summary = summarize(dict(tensors.values()))
    row.bits = summary.bits_per_parameter
    row.bytes = summary.bytes
    row.perplexity = _perplexity(copy.deepcopy(material.model), material)


def _quantize(row: Row, material: Material) -> nn.Module:
    """Fill a row, and return a copy of the model quantized by its scheme."""
    from quark.torch.export.checkpoint.writer import collect, make_format
    from quark.torch.export.checkpoint_contents import summarize
    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.builder import build_config
    from quark.torch.quantization.config.description import type_name
    from quark.torch.quantization.config.export import JsonExporterConfig

    model = copy.deepcopy(material.model)
    config = build_config(layer_scheme("--schemes", row.scheme))
    start = time.monotonic()
    model = ModelQuantizer(config).quantize_model(model, material.calibration)
    model = ModelQuantizer.freeze(model)
    row.seconds = time.monotonic() - start
    stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(stored, config, type_name(next(material.model.parameters()).dtype))
    row.bits, row.bytes = summary.bits_per_weight, summary.bytes
    return model


def _perplexity(model: nn.Module, material: Material) -> float:
    """Return the perplexity, computed in float32: many processors are slow with narrower types.

    The model is converted in place. Weights keep their values.
    """
    from quark.torch.evaluation.perplexity import perplexity

    return perplexity(model.float(), material.evaluation)


def _export(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    from quark.torch.export.api import export_safetensors

    export_safetensors(model, directory, tokenizer=tokenizer)


@contextmanager
def _live_table(rows: list[Row]) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the current rows: in place, or line after line."""
    if console.out.is_terminal:
        with (
            Live(_table(rows), console=console.out) as live,
            redirect_stderr(_NonTerminal(sys.stderr)),
        ):
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


class _NonTerminal:
    """A stream that is not a terminal, so that no progress bars are drawn into the table."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _table(rows: list[Row]) -> Table:
    table = console.table()
    table.add_column("scheme", no_wrap=True)
    for column in ("bits/weight", "size", "perplexity", "change", "quantized in"):
        table.add_column(column, justify="right", min_width=10, no_wrap=True)
    reference = rows[0].perplexity
    for row in rows:
        change = ""
        if row.perplexity is not None and reference is not None and row.scheme != ORIGINAL:
            change = console.format_change(row.perplexity, reference)
        perplexity = "" if row.perplexity is None else f"{row.perplexity:.2f}"
        bits = size = seconds = ""
        if row.bytes is not None:
            bits, size = console.format_bits(row.bits), console.format_bytes(row.bytes)
        if row.seconds is not None:
            seconds = f"{row.seconds:.1f} s"
        table.add_row(row.scheme, bits, size, perplexity, change, seconds)
    return table
