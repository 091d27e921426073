"""``quark recipes``: schemes with the algorithms that work best with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from quark.cli import console
from quark.cli.options import Json, add_verb

HELP = """
List the recipes of [cyan]quark quantize --recipe[/cyan].

A recipe is a scheme with the algorithms that work best with it, in their
order. One whose name ends in _rotated needs a client that rotates inputs:
this package, or vLLM with the layout compressed-tensors.

[bold]Examples[/bold]

    [cyan]quark recipes[/cyan]

    [cyan]quark quantize --model_dir llama --output_dir llama-w4 --recipe w4[/cyan]
"""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "recipes", recipes, HELP)


def recipes(as_json: Json = False) -> None:
    """Print all recipes."""
    from quark.torch.quantization.config.recipes import RECIPES

    rows = [
        {"name": name, "quant_scheme": scheme, "algorithms": list(algorithms)}
        for name, (scheme, algorithms) in RECIPES.items()
    ]
    if as_json:
        console.as_json({"recipes": rows})
        return
    table = console.table()
    for column in ("--recipe", "--quant_scheme"):
        table.add_column(column, no_wrap=True)
    table.add_column("algorithms", overflow="fold")
    for name, (scheme, algorithms) in RECIPES.items():
        table.add_row(name, scheme, ", ".join(_describe(options) for options in algorithms))
    console.out.print("", table)


def _describe(options: dict[str, Any]) -> str:
    """Return the name of an algorithm with its options: ``smooth (alpha 0.8)``."""
    given = list(_in_words({name: value for name, value in options.items() if name != "name"}))
    return f"{options['name']} ({', '.join(given)})" if given else str(options["name"])


def _in_words(options: dict[str, Any]) -> Iterator[str]:
    """Iterate over options in words, those inside of others too."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _in_words(value)
        elif isinstance(value, bool):
            yield name if value else f"no {name}"
        else:
            yield f"{name} {' '.join(value) if isinstance(value, list) else value}"
