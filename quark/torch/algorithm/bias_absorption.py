"""Bias absorption (Nagel et al. 2019, section 4.1.3): high biases move into the next layer.

Where all outputs of a channel are at least c > 0, max(z - c, 0) = max(z, 0) - c. So c can leave the
bias in front of the activation, and W₂ c enter the bias after it:

    y = W₂ f(W₁ x + b₁) + b₂ = W₂ f(W₁ x + b₁ - c) + (b₂ + W₂ c)

The range of the activation ends c lower. The paper takes c from the statistics of batch norms, and
cuts some values; here c is the smallest value of the calibration data, which cuts none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.parameter_writes import write_
from quark.torch.graph.residency import resident
from quark.torch.graph.structure import Edit, RescalingGroup
from quark.torch.graph.trace import iter_tensors
from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.pipeline.batches import flatten_batches, run_batch
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.model_pass import run_data
from quark.torch.pipeline.reducer import Reducer
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

# Largest part of its norm by which a tensor may differ: rounding is near 1e-6. A border of zeros,
# which the moved part does not reach, changes products by far more.
_TOLERANCE = 1e-4


@torch.no_grad()
def absorb_biases(context: Context, groups: Sequence[RescalingGroup]) -> None:
    """Move what all outputs of a channel have in common into the biases of the layers after them.

    Each step is proved on the first batch: the products of these layers change by one number
    for each of their outputs, and the outputs of the model stay. A step that does not hold is
    undone, and the log names it.

    Args:
        context: The model, with calibration data.
        groups: Layers that are followed by others through positively homogeneous operations.
    """
    candidates = [group for group in groups if _is_movable(context, group)]
    ranges = _observe_outputs(context, [group.producer for group in candidates])
    amounts = ((group, _amounts(context, group, ranges[group.producer])) for group in candidates)
    steps = [(group, amount) for group, amount in amounts if bool((amount > 0).any())]
    if not steps:
        logger.info("No bias is absorbed: each channel has values near or below zero.")
        return
    batch = next(flatten_batches(context.batches))
    with eval_mode(context.model):
        expected = list(iter_tensors(run_batch(context.model, batch)))
        for group, amount in steps:
            problem = _absorb(context, group, amount, batch, expected)
            if problem:
                logger.info("The bias of %s is not absorbed: %s.", group.producer, problem)
            else:
                count = int((amount > 0).sum())
                logger.info("%s: the biases of %d channels are absorbed.", group.producer, count)


def _is_movable(context: Context, group: RescalingGroup) -> bool:
    """Whether the producer is a layer with a bias, and all layers that read its output are."""
    layers = [context.layers.get(name) for name in (group.producer, *_readers(context, group))]
    has_biases = all(m is not None and getattr(m, "bias", None) is not None for m in layers)
    is_plain = all(edit.power == -1 and not edit.offset for edit in _vectors(context, group))
    return has_biases and is_plain and not group.unreached


def _readers(context: Context, group: RescalingGroup) -> list[str]:
    """Return the layers after the producer: consumers, and depthwise convolutions before them."""
    owners = (edit.parameter.rpartition(".")[0] for edit in group.edits)
    depthwise = [name for name in owners if name in context.layers and name != group.producer]
    return list(dict.fromkeys([*depthwise, *group.consumers]))


def _vectors(context: Context, group: RescalingGroup) -> list[Edit]:
    """Return the edits of the bias of the producer and of the caps of its activation."""
    readers = _readers(context, group)
    return [
        edit
        for edit in group.edits
        if edit.power < 0
        and context.model.get_parameter(edit.parameter).dim() == 1
        and edit.parameter.rpartition(".")[0] not in readers
    ]


def _observe_outputs(context: Context, names: Sequence[str]) -> Mapping[str, ChannelRange]:
    """Return the range of each channel of the outputs of layers, by one pass over the data."""
    ranges = {name: ChannelRange() for name in names}

    @contextmanager
    def observe() -> Iterator[None]:
        def watch(name: str) -> Callable[..., None]:
            return lambda layer, args, y: ranges[name](_by_channel(layer, y.detach()).T)

        with ExitStack() as stack:
            for name in names:
                hook = context.layers[name].register_forward_hook(watch(name))
                stack.callback(hook.remove)
            yield

    run_data(
        context.model, context.batches, "bias absorption", observe=observe, observed=set(names)
    )
    return Reducer(ranges, lambda leaf: ChannelRange()).combine(ranges)


def _by_channel(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Return outputs of a layer, (channels, tokens or positions)."""
    assert isinstance(layer, FakeQuantizedLayer)
    # The channels are the last axis of tokens; those of images, (batch,) channels, height, width.
    axis = -1 if layer.is_linear else 1 - layer.weight.dim()
    return y.movedim(axis, 0).flatten(1)


def _amounts(context: Context, group: RescalingGroup, outputs: ChannelRange) -> torch.Tensor:
    """Return what can leave each channel of a group, (size,) float64 on the CPU, not negative."""
    amounts = torch.full((group.size,), torch.inf, dtype=torch.float64, device="cpu")
    if outputs.lo is None:
        return torch.zeros_like(amounts)
    for edit in _vectors(context, group):
        # No value is below the smallest output, and no cap becomes negative.
        is_bias = edit.parameter == f"{group.producer}.bias"
        limits = outputs.lo if is_bias else context.model.get_parameter(edit.parameter)
        limits, has_factor = limits.detach().double().cpu(), edit.index >= 0
        amounts.scatter_reduce_(0, edit.index[has_factor], limits[has_factor], "amin")
    return amounts.clamp(min=0).nan_to_num(posinf=0.0)


def _absorb(
    context: Context,
    group: RescalingGroup,
    amounts: torch.Tensor,
    batch: Any,
    expected: Sequence[torch.Tensor],
) -> str:
    """Absorb the biases of one group in place; return why it was undone, "" if it was not."""
    model, vectors, readers = context.model, _vectors(context, group), _readers(context, group)
    names = dict.fromkeys([*(e.parameter for e in vectors), *(f"{name}.bias" for name in readers)])
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in readers}
    problems: list[str] = []

    def keep(name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[name].append(args[0].detach().clone())

    def take_over(name: str, layer: FakeQuantizedLayer, args: tuple[Any, ...]) -> None:
        """Move the change of a product into the bias, before the layer computes with it."""
        shift = _shift(layer, inputs[name][0], args[0].detach())
        if shift is None or len(inputs[name]) > 1:
            problems.append(f"outputs of {name} would change, by an amount for each position")
        else:
            write_(layer.bias, layer.bias.double() + shift)

    with resident(model, *names):
        before = {name: model.get_parameter(name).detach().clone() for name in names}
        with _hooks(context, readers, keep):
            run_batch(model, batch)
        for edit in vectors:
            moved = torch.cat([amounts, amounts.new_zeros(1)])[edit.index]  # -1: the zero
            parameter = model.get_parameter(edit.parameter)
            write_(parameter, parameter.double() - moved.to(parameter.device))
        with _hooks(context, readers, take_over):
            outputs = list(iter_tensors(run_batch(model, batch)))
        if not problems and not all(map(_is_close, outputs, expected)):
            problems.append("outputs of the model would change")
        if problems:
            for name, values in before.items():
                write_(model.get_parameter(name), values)
    return problems[0] if problems else ""


@contextmanager
def _hooks(context: Context, names: Sequence[str], hook: Callable[..., None]) -> Iterator[None]:
    """Call a function with the name and the arguments of layers before they compute."""
    with ExitStack() as stack:
        for name in names:
            handle = context.layers[name].register_forward_pre_hook(partial(hook, name))
            stack.callback(handle.remove)
        yield


def _shift(
    layer: FakeQuantizedLayer, before: torch.Tensor, after: torch.Tensor
) -> torch.Tensor | None:
    """Return how much smaller products are, (outputs,) float64; None if positions differ."""
    weight, zeros = layer.weight.detach().double(), torch.zeros_like(layer.bias).double()
    products = [
        _by_channel(layer, layer.product(x.double(), weight, zeros)) for x in (before, after)
    ]
    change = products[0] - products[1]
    shift = change.mean(1)
    limit = _TOLERANCE * (products[0].square().mean().sqrt() + shift.abs().amax())
    return shift if bool(((change - shift.unsqueeze(1)).abs() <= limit).all()) else None


def _is_close(value: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (value.double() - expected.double()).norm()
    return bool(difference <= _TOLERANCE * expected.double().norm())
