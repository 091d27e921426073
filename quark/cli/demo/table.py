"""One model under several schemes, in a table that is filled row by row, and on a page."""

from __future__ import annotations

import copy
import sys
import tempfile
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
from quark.cli.models import EVALUATION, load_model
from quark.cli.quantize.config import layer_scheme

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.evaluation.predictions import Predictions, Reference


@dataclass
class Row:
    """The figures of one scheme; None for those that are not known yet."""

    scheme: str
    words: str = ""  # what is quantized how
    bits: float | None = None
    bytes: int | None = None
    predictions: Predictions | None = None
    answer: str | None = None
    seconds: float | None = None
    speed: float | None = None  # tokens per second


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
        return {
            row.scheme: (row.bits, 100 * row.predictions.change)
            for row in self.rows
            if row.bits and row.predictions and row.predictions.change is not None
        }

    def page(self, material: Material, generator: str) -> str:
        """Return a page that shows the models side by side."""
        from quark.torch.report.comparison import ComparedModel
        from quark.torch.report.comparison import Comparison as Content
        from quark.torch.report.contents import Text
        from quark.torch.report.continuation import Continuation
        from quark.torch.report.page import comparison_page

        models = [
            ComparedModel(
                directory=row.scheme,
                name=row.scheme,
                schemes=row.words,
                bytes=row.bytes,
                bits_per_weight=row.bits,
                predictions=row.predictions,
                seconds=row.seconds or 0.0,
                continuation=Continuation(row.answer, row.speed),
            )
            for row in self.rows
            if row.bytes and row.predictions and row.answer is not None
        ]
        text = Text(EVALUATION, *material.evaluation.shape)
        return comparison_page(Content(text, material.prompt.text, models).to_dict(), generator)


def compare(
    names: list[str], exported: str, material: Material, directory: Path, is_timed: bool = False
) -> Comparison:
    """Fill the table, and export one scheme; ``is_timed`` adds the speed of each."""
    from quark.torch.evaluation.perplexity import BATCH_SIZE
    from quark.torch.evaluation.predictions import Reference
    from quark.torch.pipeline.activation_store import ActivationStore
    from quark.torch.pipeline.memory_limit import results_limit

    original, *rows = [Row(name) for name in (ORIGINAL, *names)]
    sample: torch.Tensor | None = None
    kept = results_limit(False, None, "cpu")
    with _live_table([original, *rows], is_timed) as show, ActivationStore(kept) as store:
        show()
        reference = Reference(store)
        _measure_original(original, material, reference)
        if is_timed:
            original.speed = material.speed(material.model)
        for row in rows:
            show()
            model = _quantize(row, material)
            show()
            if row.scheme == exported:
                _export(model, material.tokenizer, directory)
                sample = material.logits(model)
            row.answer = material.answer(model)
            if is_timed:
                row.speed = _speed(model, material)
            row.predictions = reference.compare(
                _in_float(model), material.evaluation, BATCH_SIZE, title=row.scheme
            )
        show()
    assert sample is not None
    return Comparison(sample, [original, *rows])


def _measure_original(row: Row, material: Material, reference: Reference) -> None:
    from quark.torch.evaluation.perplexity import BATCH_SIZE
    from quark.torch.export.checkpoint_contents import summarize

    # A tensor that two modules share is stored once.
    tensors = {t.data_ptr(): (name, t) for name, t in material.model.state_dict().items()}
    summary = summarize(dict(tensors.values()))
    row.bits = summary.bits_per_parameter
    row.bytes = summary.bytes
    row.answer = material.answer(material.model)
    model = _in_float(copy.deepcopy(material.model))
    reference.run(model, material.evaluation, BATCH_SIZE, title=ORIGINAL)
    row.predictions = reference.predictions


def _quantize(row: Row, material: Material) -> nn.Module:
    """Fill a row, and return a copy of the model quantized by its scheme."""
    from quark.torch.export.checkpoint.writer import collect, make_format
    from quark.torch.export.checkpoint_contents import summarize
    from quark.torch.numerics.dtypes import type_name
    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.builder import build_config
    from quark.torch.quantization.config.export import JsonExporterConfig

    model = copy.deepcopy(material.model)
    config = build_config(layer_scheme("--schemes", row.scheme))
    start = time.monotonic()
    model = ModelQuantizer(config).quantize_model(model, material.calibration)
    model = ModelQuantizer.freeze(model)
    row.seconds = time.monotonic() - start
    stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(stored, config, type_name(next(material.model.parameters()).dtype))
    row.bits, row.bytes, row.words = summary.bits_per_weight, summary.bytes, summary.scheme_words()
    return model


def _speed(model: nn.Module, material: Material) -> float:
    """Return the tokens per second of a quantized model that is loaded from packed codes."""
    with tempfile.TemporaryDirectory(prefix="quark-demo-", ignore_cleanup_errors=True) as directory:
        _export(model, material.tokenizer, Path(directory))
        return material.speed(load_model(Path(directory), runtime="fast"))


def _in_float(model: nn.Module) -> nn.Module:
    """Convert a model in place to float32, in which most processors are faster than in bfloat16.

    Weights keep their values.
    """
    return model.float()


def _export(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    from quark.torch.export.api import export_safetensors

    export_safetensors(model, directory, tokenizer=tokenizer)


@contextmanager
def _live_table(rows: list[Row], is_timed: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that shows the current rows: in place, or line after line."""
    if console.out.is_terminal:
        with (
            Live(_table(rows, is_timed), console=console.out) as live,
            redirect_stderr(_NonTerminal(sys.stderr)),
        ):
            yield lambda: live.update(_table(rows, is_timed), refresh=True)
        return
    printed = 0

    def show() -> None:
        nonlocal printed
        with console.out.capture() as captured:
            console.out.print(_table(rows, is_timed))
        lines = captured.get().rstrip().splitlines()
        known = len(lines) - sum(row.predictions is None for row in rows)
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


def _table(rows: list[Row], is_timed: bool) -> Table:
    table = console.table()
    table.add_column("scheme", no_wrap=True)
    columns = ["bits/weight", "size", "perplexity", "change", "quantized in"]
    for column in [*columns, *["tokens/s"] * is_timed]:
        width = 16 if column == "change" else 10  # +100.0 % ± 10.0 %
        table.add_column(column, justify="right", min_width=width, no_wrap=True)
    for row in rows:
        perplexity = change = ""
        if row.predictions is not None:
            perplexity = f"{row.predictions.perplexity:.2f}"
            change = console.format_paired_change(row.predictions)
        bits = size = seconds = ""
        if row.bytes is not None:
            bits, size = console.format_bits(row.bits), console.format_bytes(row.bytes)
        if row.seconds is not None:
            seconds = f"{row.seconds:.1f} s"
        speed = ["" if row.speed is None else f"{row.speed:.1f}"] * is_timed
        table.add_row(row.scheme, bits, size, perplexity, change, seconds, *speed)
    return table
