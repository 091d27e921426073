"""Bias correction (Nagel et al. 2019, section 4.2): the mean error of the outputs leaves the bias.

Rounding a weight W by D moves the mean of the outputs by E[D x], which is not zero: a few inputs
meet each output of a depthwise convolution, and after ReLU all inputs are positive. Rounding the
inputs by e moves it by E[W e]: small values after GELU have one sign, and become zero. So the mean
of both over the calibration data and all positions is subtracted from the bias.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from quark.torch.algorithm.layer_inputs import quantize_inputs_of
from quark.torch.algorithm.layers import (
    check_weights_quantized,
    fake_quantized_weight,
    has_quantized_weight,
)
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.numerics.finite import is_finite
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.input_hooks import InfiniteInput
from quark.torch.pipeline.model_pass import run_data
from quark.torch.pipeline.processes import State
from quark.torch.pipeline.reducer import Reducer
from quark.torch.pipeline.shapes import (
    FLOAT32,
    FLOAT64,
    PASS_READS,
    BlockShape,
    DataShape,
    Work,
)
from quark.torch.quantization.config.algo import BiasCorrectionConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.padding import without_padding

logger = logging.getLogger(__name__)

Layers = Mapping[str, FakeQuantizedLayer]


class MeanError:
    """Mean of the change of the outputs of a layer, for each output channel.

    Attributes:
        count: Number of tokens or positions.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None  # (outputs,) float64
        self.count = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return self._total is None

    @property
    def mean(self) -> torch.Tensor:
        """(outputs,) float64: the mean."""
        assert self._total is not None
        return self._total / self.count

    def __call__(self, change: torch.Tensor) -> None:
        """Observe (outputs, tokens or positions)."""
        if change.numel():
            total = change.sum(1, dtype=torch.float64)
            self._total = total if self._total is None else self._total + total
            self.count += change.shape[1]

    def merge(self, other: MeanError) -> None:
        """Add the data that another one has observed."""
        if other._total is not None:
            self._total = other._total if self._total is None else self._total + other._total
        self.count += other.count

    def tensors(self) -> State:
        """Return the sum and the count."""
        return self._total, torch.tensor(self.count, dtype=torch.float64, device="cpu")

    def set_tensors(self, tensors: State) -> None:
        """Replace the sum and the count."""
        self._total, count = tensors
        assert count is not None
        self.count = float(count)


def check(options: BiasCorrectionConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def resolve(context: Context, options: BiasCorrectionConfig) -> Collection[str]:
    """Raise if no layer can be corrected; no input is rotated.

    Raises:
        ValueError: No layer with a quantized weight has a bias.
    """
    if not _layers_with_bias(context):
        raise ValueError(
            "bias_correction: no layer with a quantized weight has a bias, which would take the "
            "correction. Leave it out, or fold batch norms first (graph mode does)."
        )
    return ()


def apply(context: Context, options: BiasCorrectionConfig) -> None:
    """Correct the biases of all layers with quantized weights, by one pass over the data."""
    layers = _layers_with_bias(context)
    without = sorted(n for n, m in _quantized(context).items() if n not in layers)
    if without:
        logger.info("Not corrected, since there is no bias: %s.", ", ".join(without))
    errors = {name: MeanError() for name in layers}
    run_data(
        context.model,
        context.batches,
        "bias correction",
        observe=partial(_observe_errors, layers, errors),
        observed=layers,
    )
    errors = Reducer(errors, lambda leaf: MeanError()).combine(errors)
    for name, layer in layers.items():
        if errors[name].is_empty:
            logger.warning("The bias of %s is not corrected: no data reached it.", name)
            continue
        with resident(context.model, f"{name}.bias"):
            mean = errors[name].mean.to(layer.bias.device)
            write_(layer.bias, layer.bias.detach().double() - mean)


def _quantized(context: Context) -> Layers:
    return {n: m for n, m in context.layers.items() if has_quantized_weight(m.quant_config)}


def _layers_with_bias(context: Context) -> Layers:
    return {n: m for n, m in _quantized(context).items() if getattr(m, "bias", None) is not None}


@contextmanager
def _observe_errors(layers: Layers, errors: Mapping[str, MeanError]) -> Iterator[None]:
    """Observe how rounding changes the outputs of layers while data runs inside the context."""
    changes: dict[str, torch.Tensor] = {}  # name of a layer -> rounded weight minus weight

    def watch(name: str) -> Callable[..., None]:
        def hook(layer: FakeQuantizedLayer, args: tuple[Any, ...]) -> None:
            if name not in changes:
                weight = layer.weight.detach()
                rounded = fake_quantized_weight(layer, weight)
                changes[name] = rounded.float() - weight.float()
            errors[name](_output_change(layer, changes[name], args))

        return hook

    handles = [m.register_forward_pre_hook(watch(name)) for name, m in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _output_change(
    layer: FakeQuantizedLayer, change: torch.Tensor, args: tuple[Any, ...]
) -> torch.Tensor:
    """Return how rounding changes the outputs, (outputs, tokens or positions).

    Args:
        layer: The layer, whose weight is in float.
        change: What rounding adds to its weight, in the shape of the weight.
        args: Arguments of the layer.

    Raises:
        InfiniteInput: An input is NaN or infinite.
    """
    prepared = layer.prepared_input(args[0].detach())
    with quantize_inputs_of([layer]):
        rounded = layer.rounded_input(prepared)
    is_tokens = layer.is_linear
    x = without_padding(rounded) if is_tokens else rounded
    if not is_finite(x):
        raise InfiniteInput(layer, x.dtype)
    zeros = torch.zeros_like(layer.bias, dtype=torch.float32)
    y = layer.product(x.float(), change, zeros, *args[1:])
    if rounded is not prepared:
        noise = x.float() - (without_padding(prepared) if is_tokens else prepared).float()
        y = y + layer.product(noise, layer.weight.detach().float(), zeros, *args[1:])
    # The channels are the last axis of tokens; those of images, (batch,) channels, height, width.
    axis = -1 if is_tokens else 1 - change.dim()
    return y.movedim(axis, 0).flatten(1)


def work(options: BiasCorrectionConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: a pass with each product three times, and changes of weights."""
    memory = FLOAT32 * block.elements + FLOAT64 * sum(x.outputs for x in block.layers)
    return Work(memory, 3, 0.0, stores=3, reads=PASS_READS, runs_model=True)


ALGORITHM = Algorithm(check, apply, work=work, resolve=resolve)
