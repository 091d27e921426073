"""Bytes of a quantized checkpoint by kind of layer, and the modules that stay in float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer_types import NAMED_ONLY
from quark.torch.quantization.config.match import config_for, matches
from quark.torch.quantization.nn.experts import is_stacked
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.report.layer import Layer

OTHER = "biases, scales of activations"


@dataclass(frozen=True)
class FloatPart:
    """A module with parameters that are not quantized.

    Attributes:
        name: Full name of the module.
        kind: Name of modules with its purpose.
        parameters: Number of its own parameters.
        bytes: Bytes of these parameters.
        reason: Reason why it is not quantized.
    """

    name: str
    kind: str
    parameters: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class Kind:
    """All layers of one purpose.

    Attributes:
        name: Name of the purpose, such as ``q_proj``.
        is_quantized: Whether they are quantized.
        layers: Number of layers.
        parameters: Number of their weights, or of all parameters if they are in float.
        bytes: Bytes of these.
    """

    name: str
    is_quantized: bool
    layers: int
    parameters: int
    bytes: int


def kind_of(name: str) -> str:
    """Return the last part of a name that is not a number: ``q_proj``."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    return parts[-1] if parts else name


def float_parts(model: nn.Module, config: Config) -> list[FloatPart]:
    """Return the modules that are not quantized, in order; what is shared counts once."""
    found = []
    owners: dict[int, str] = {}  # parameter -> the first module that has it
    for name, module in model.named_modules():
        if isinstance(module, PackedLayer):
            continue
        own: list[Any] = [p for p in module._parameters.values() if p is not None]
        if own:
            counted = [p for p in own if id(p) not in owners]
            owners |= {id(p): name for p in counted}
            count, size = sum(p.numel() for p in counted), sum(p.nbytes for p in counted)
            tied = f"has the weight of {owners[id(own[0])]}"
            reason = _reason(name, module, config) if counted else tied
            found.append(FloatPart(name, kind_of(name), count, size, reason))
    return found


def _reason(name: str, module: nn.Module, config: Config) -> str:
    kind = type(module)
    if is_stacked(module):
        return "experts that the configuration does not name"
    if not is_operator(kind):
        return f"{kind.__name__} is not a product with a matrix"
    pattern = next((p for p in config.exclude if matches(name, [p])), None)
    if pattern is not None:
        return f"excluded by {pattern!r}"
    if config_for(name, kind, config) is not None:
        return "stored in float, although the configuration names it"
    if kind in NAMED_ONLY:
        return f"{kind.__name__} is quantized where a configuration names it"
    return "the configuration does not name it"


def kinds(layers: Sequence[Layer], floats: Sequence[FloatPart], total: int) -> list[Kind]:
    """Return totals by kind of layer, the largest first; they sum to ``total`` bytes."""
    parts = [(x.kind, True, x.weights, x.bytes) for x in layers]
    parts += [(x.kind, False, x.parameters, x.bytes) for x in floats]
    found: dict[tuple[str, bool], Kind] = {}
    for name, is_quantized, count, size in parts:
        so_far = found.get((name, is_quantized), Kind(name, is_quantized, 0, 0, 0))
        found[name, is_quantized] = Kind(
            name,
            is_quantized,
            so_far.layers + 1,
            so_far.parameters + count,
            so_far.bytes + size,
        )
    rest = total - sum(kind.bytes for kind in found.values())
    others = [Kind(OTHER, False, 0, 0, rest)] if rest > 0 else []
    return sorted([*found.values(), *others], key=lambda kind: -kind.bytes)
