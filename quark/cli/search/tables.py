"""The tables that ``quark search`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from quark.cli import console
from quark.cli.search.measurement import MIXTURE, ORIGINAL, Measure

if TYPE_CHECKING:
    from quark.torch.search.mixtures import Mixture

TOLERANCE = 0.005  # relative difference of sizes that count as equal


def print_result(mixture: Mixture, chosen: Mapping[str, str], measure: Measure) -> None:
    """Print the format of each layer, and the loss compared with one format for all."""
    from quark.torch.quantization.nn.router_choices import describe_agreement

    console.out.print("", _layer_table(mixture, chosen), _size_table(mixture, chosen, measure))
    console.out.print(
        "  Losses are predicted, in thousandths of a nat per token. Perplexities are measured with "
        "rounding to the nearest.\n",
        style="dim",
    )
    choices = [measure.choices[title] for title in (ORIGINAL, MIXTURE) if title in measure.choices]
    if len(choices) == 2 and (shares := choices[0].agreement(choices[1])):
        console.say(escape(describe_agreement(shares)))


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


def _size_table(mixture: Mixture, chosen: Mapping[str, str], measure: Measure) -> Table:
    """Return a table of the mixture and of each format for all layers.

    Perplexities are measured for the mixture and for the largest format that is not larger.
    """
    table = console.table()
    table.add_column("", no_wrap=True)
    for column in ("bits/weight", "loss", "perplexity", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    reference = measure.perplexity(ORIGINAL)
    mixed, rows = mixture.cost(chosen), mixture.uniform()
    fitting = [name for name, (bits, _) in rows.items() if bits <= mixed[0] * (1 + TOLERANCE)]
    rival = max(fitting, key=lambda name: rows[name][0], default=None)
    measured = {"mixed": measure.perplexity(MIXTURE, chosen)}
    if rival is not None:
        measured[rival] = measure.perplexity(rival, dict.fromkeys(chosen, rival))
    for name, (bits, loss) in sorted({**rows, "mixed": mixed}.items(), key=lambda row: row[1]):
        value = measured.get(name)
        change = (
            "" if value is None or reference is None else console.format_change(value, reference)
        )
        table.add_row(
            name,
            console.format_bits(bits),
            f"{1000 * loss:.2f}",
            "" if value is None else f"{value:.2f}",
            change,
        )
    return table
