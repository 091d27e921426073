"""Check that a model can be the original of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from quark.cli.console import wrong
from quark.cli.models import read_config

_SIZES = ("num_hidden_layers", "hidden_size")


def check_original(directory: Path, original: Path, flag: str) -> None:
    """Check that a checkpoint and its original have as many layers, of the same width.

    Args:
        directory: Directory of the checkpoint, or its GGUF file.
        original: The same of the original.
        flag: Flag of the checkpoint, for the error.

    Raises:
        typer.BadParameter: The original is another model, or no model.
    """
    checkpoint, source = read_config(directory, flag), read_config(original, "--original")
    for key in _SIZES:
        here, there = (c.get("text_config", c).get(key) for c in (checkpoint, source))
        if None not in (here, there) and here != there:
            raise wrong(
                "--original",
                f"{original} is another model: it has {key}={there}, and {directory} has {here}. "
                "Give the model that was quantized.",
            )
