"""The tables that ``quark search`` prints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from quark.cli import console
from quark.cli.search.measurement import Result

if TYPE_CHECKING:
    from quark.torch.search.mixtures import Mixture


def print_result(mixture: Mixture, chosen: Mapping[str, str], result: Result) -> None:
    """Print the format of each layer, and the loss compared with one format for all."""
    from quark.torch.quantization.nn.router_choices import describe_agreement

    console.out.print("", _layer_table(mixture, chosen), _size_table(result))
    console.out.print(
        "  Losses are predicted divergences from the original (KL), in thousandths of a nat per "
        "token. KL and perplexity are measured with rounding to the nearest.\n",
        style="dim",
    )
    if result.routers:
        console.say(escape(describe_agreement(result.routers)))


def _layer_table(mixture: Mixture, chosen: Mapping[str, str]) -> Table:
    table = console.table()
    table.add_column("layer", overflow="fold")
    table.add_column("format", no_wrap=True)
    for column in ("weights", "bits/weight", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for unit in mixture.units:
        name = chosen[unit.layers[0]]
        more = f" and {len(unit.layers) - 1} more" if len(unit.layers) > 1 else ""
        table.add_row(
            escape(unit.layers[0] + more),
            name,
            console.format_count(unit.weights),
            console.format_bits(unit.bits[name] / unit.weights),
            f"{1000 * unit.losses[name]:.2f}",
        )
    return table


def _size_table(result: Result) -> Table:
    """Return a table of the mixture and of each format for all layers."""
    table = console.table()
    table.add_column("", no_wrap=True)
    is_timed = any(row.milliseconds is not None for row in result.sizes)
    times = ["ms per\ntoken"] if is_timed else []
    sizes = ("bits/\nweight", "size", "read per\ntoken", *times)
    for column in (*sizes, "loss", "KL", "per-\nplexity", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    reference = result.original_perplexity
    for row in result.sizes:
        value = row.perplexity
        change = (
            "" if value is None or reference is None else console.format_change(value, reference)
        )
        table.add_row(
            row.name,
            console.format_bits(row.bits_per_weight),
            console.format_bytes(row.bytes),
            console.format_bytes(row.bytes_per_token),
            *([] if row.milliseconds is None else [f"{row.milliseconds:.3g}"]),
            _millinats(row.loss),
            _millinats(row.divergence),
            "" if value is None else f"{value:.2f}",
            change,
        )
    return table


def _millinats(loss: float | None) -> str:
    """Return a loss in thousandths of a nat, with two decimals or four digits; "" for None."""
    if loss is None:
        return ""
    value = 1000 * loss
    return f"{value:.{max(0, min(2, 3 - int(math.log10(max(value, 1)))))}f}"
