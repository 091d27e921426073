"""The flags of ``quark quantize`` for graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from quark.cli.options import panel

_graph = panel("Graphs")


@dataclass(frozen=True, kw_only=True)
class GraphFlags:
    """Rewrites of graphs that are applied only if asked for, and limits of shifts.

    All but the last one are the fields of ``PassOptions``.
    """

    hard_activations: Annotated[
        bool,
        _graph(help="Replace SiLU and GELU by piecewise polynomials. This changes the function."),
    ] = False
    largest_pool: Annotated[
        int | None,
        _graph(
            metavar="N", min=2, help="Split pooling windows with more elements than this number."
        ),
    ] = None
    channel_caps: Annotated[
        bool, _graph(help="Make ReLU6 a ReLU and a cap for each channel, a parameter.")
    ] = False
    fused_activations: Annotated[
        bool,
        _graph(help="Quantize after activations such as PReLU and GELU alone, not before them."),
    ] = False
    float_outputs: Annotated[
        bool, _graph(help="Leave the values that the graph returns in float.")
    ] = False
    shift_limits: Annotated[
        str | None,
        _graph(
            metavar="LIMITS",
            help="Limits of shifts of an integer-only device, such as cut=0:16,read=0:15, or "
            "default. Scales must be powers of two.",
        ),
    ] = None
