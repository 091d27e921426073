"""Check of the patterns of ``--exclude_layers`` against the layers of a model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("quark")


def check_exclusions(
    patterns: Sequence[str], model: nn.Module, layers: Sequence[str], default: str = ""
) -> list[str]:
    """Check that a name matches a layer, and one of several patterns with wildcards.

    The other patterns are warned of: such a list serves models of several architectures. Modules
    that are in float anyway may be named too. ``lm_head`` is the output head of any model.

    Args:
        patterns: Those of layers that stay in float.
        model: The float model, which may be on the meta device, or a graph.
        layers: Names of its layers that can be quantized.
        default: A sentence for the message: what stays in float without the flag.

    Returns:
        The patterns that were warned of.

    Raises:
        typer.BadParameter: A name or all patterns match nothing, or one only modules that hold
            layers.
    """
    from quark.torch.quantization.config.match import matches
    from quark.torch.quantization.config.resolution import OUTPUT_HEAD

    if "*" in patterns:
        raise console.wrong(
            "--exclude_layers", "'*' leaves all layers in float. Name fewer, such as lm_head."
        )
    unknown = []
    for pattern in patterns:
        if pattern == OUTPUT_HEAD or any(matches(name, [pattern]) for name in layers):
            continue
        modules = [name for name, _ in model.named_modules() if name and matches(name, [pattern])]
        inside = [name for name in layers if name.startswith(tuple(f"{m}." for m in modules))]
        if inside:
            raise console.wrong(
                "--exclude_layers",
                f"{pattern!r} matches modules that hold layers, such as {inside[0]!r}, and no "
                f"layer. Write {pattern + '.*'!r}.",
            )
        if not modules:
            unknown.append(pattern)
    for pattern in unknown:
        said = f"no layer matches {pattern!r}. {nearest_layers(pattern, layers)}"
        if "*" not in pattern or len(unknown) == len(patterns):
            raise console.wrong("--exclude_layers", said + default)
        logger.warning("--exclude_layers: %s", said)
    return unknown


def nearest_layers(pattern: str, layers: Sequence[str]) -> str:
    """Return the sentence that names layers similar to a pattern."""
    from quark.torch.quantization.config.name_lookup import nearest

    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    near = nearest(pattern.strip("*"), [*endings, *layers])
    return f"Nearest: {', '.join(near)}." if near else f"Layers: {', '.join(endings[:8])}."
