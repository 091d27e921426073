"""Run data through a float model once, and keep all that quantizing its weights asks of the data.

Beside the sums of x xᵀ over the inputs x of each layer, which give the squared error of its outputs
for any change of its weight, it is measured how much the model's predictions mind such an error:
each layer alone is rounded coarsely, and the divergence of the predictions divided by the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from quark.torch.algorithm.awq import output_error
from quark.torch.algorithm.groups import as_rows, block_layers, observe_grams
from quark.torch.algorithm.kept import Statistics, data_digest, fingerprint
from quark.torch.algorithm.statistics import Gram
from quark.torch.graph.discover import discover
from quark.torch.graph.inference import at_inference
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.inference import (
    excerpt,
    padding_mask,
    parts,
    progress,
    repeatable,
    run_batch,
)
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.store import ActivationStore
from quark.torch.quantization.calibrate import observing, settle_weights
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.experts import counterparts, fuse, unfuse
from quark.torch.quantization.nn.mixin import QuantMixin, is_transposed
from quark.torch.quantization.prepare import prepare, quantized_layers, restore

PROBES = 8  # calls of the model that each layer is rounded for
COARSE = 64  # weights that share a scale then


def collect_statistics(
    model: nn.Module, dataloader: Iterable[Any], probes: int = PROBES
) -> Statistics:
    """Collect what algorithms and searches need to know of a float model and its data.

    Data runs through each decoder block once. After that the first calls of the model are repeated
    for each layer. The sums take 4 · inputs² bytes of main memory for each tensor that linear
    layers of decoder blocks read.

    Args:
        model: A float model, on any device. It is unchanged in the end.
        dataloader: Batches for the model: tensors, mappings of arguments, or lists of these.
        probes: Calls of the model to measure sensitivities on, which a search for mixed precision
            needs; 0 to leave that out.

    Raises:
        ValueError: There is no data, or the model has no linear layers in decoder blocks.
    """
    batches = repeatable(dataloader)
    first = next(iter(parts(batches)), None)
    if first is None:
        raise ValueError("The dataloader is empty: statistics need at least a batch.")
    digests, data = fingerprint(model), data_digest(batches)
    experts = unfuse(model)
    try:
        structure = discover(model, lambda: run_batch(model, excerpt(first)))
        names = list(_linear_layers(model, structure))
        if not names:
            raise ValueError(f"{type(model).__name__} has no linear layers in decoder blocks.")
        prepare(model, {name: _coarse(model.get_submodule(name)) for name in names})
        try:
            with observing(model, ()), at_inference(model):
                readers, inputs = _observe(model, structure, batches)
                units = _units(model, names)
                calls = list(islice(parts(batches), probes))
                found = _sensitivities(model, units, calls, readers, inputs) if calls else {}
        finally:
            restore(model)
    finally:
        fuse(experts)
    return Statistics(digests, data, readers, inputs, units, found)


def _linear_layers(model: nn.Module, structure: Structure) -> Iterator[str]:
    blocks = tuple(f"{block}." for block in structure.blocks)
    for name, module in model.named_modules():
        is_linear = type(module) is nn.Linear or is_transposed(type(module))
        if is_linear and name.startswith(blocks):
            yield name


def _coarse(layer: Any) -> QuantizationConfig:
    """Return the configuration of a layer that is rounded to two bits."""
    turned = is_transposed(type(layer))
    inputs = layer.weight.shape[0 if turned else 1]
    size = COARSE if inputs % COARSE == 0 else inputs
    spec = QuantizationSpec(
        "int2",  # type: ignore[arg-type]
        qscheme="per_group",  # type: ignore[arg-type]
        ch_axis=-1,
        group_size=size,
        symmetric=True,
        is_dynamic=False,
    )
    return QuantizationConfig(weight=spec)


def _observe(
    model: nn.Module, structure: Structure, batches: Iterable[Any]
) -> tuple[dict[str, str], dict[str, Gram]]:
    """Return for each layer the first that reads the same tensor, and the sums for these."""
    layers = dict(quantized_layers(model))
    settle = partial(settle_weights, config=Config())
    context = Context(model, layers, structure, batches, Config(), settle)
    readers: dict[str, str] = {}
    inputs: dict[str, Gram] = {}
    for block in run_blocks(model, structure.blocks, batches, "statistics"):
        grams = observe_grams(context, block, block_layers(context, block.name, lambda _: True))
        firsts: dict[int, str] = {}
        for name, gram in grams.items():
            readers[name] = firsts.setdefault(id(gram), name)
        inputs |= {name: grams[name].to("cpu") for name in firsts.values()}
    return readers, inputs


def _units(model: nn.Module, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the layers by what must share a format: all experts beside each other, else each."""
    stacks = {name: name.rsplit(".", 2)[0] for names in counterparts(model) for name in names}
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(stacks.get(name, name), []).append(name)
    return tuple(tuple(unit) for unit in units.values())


@torch.no_grad()
def _sensitivities(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    calls: Sequence[Any],
    readers: dict[str, str],
    inputs: dict[str, Gram],
) -> dict[str, float]:
    """Return the divergence for each unit of squared error of outputs, by layer."""
    found: dict[str, float] = {}
    with ActivationStore() as expected:
        for index, call in enumerate(calls):
            expected[index] = _predictions(model, call)
        for unit in progress(units, "sensitivities"):
            layers = {name: _layer(model, name) for name in unit}
            settle_weights(layers, Config())
            error = sum(
                weight_error(layer, rounded(layer), inputs[readers[name]])
                for name, layer in layers.items()
            )
            with _rounding(layers.values()):
                lost = _divergence(model, calls, expected)
            found |= dict.fromkeys(unit, lost / error if error else 0.0)
    return found


def _layer(model: nn.Module, name: str) -> QuantMixin:
    layer = model.get_submodule(name)
    assert isinstance(layer, QuantMixin)
    return layer


def rounded(layer: QuantMixin) -> torch.Tensor:
    """Return the weight of a layer rounded to the nearest, under settled scales."""
    assert layer.weight_quantizer is not None
    return layer.weight_quantizer.bake_(layer.weight.detach().clone())


def weight_error(layer: QuantMixin, weight: torch.Tensor, gram: Gram) -> float:
    """Return the squared error of the outputs of a layer under another weight, over all tokens."""
    if gram.total is None:
        return 0.0
    change = weight.float() - layer.weight.detach().float()
    rows = as_rows(change, 0 if is_transposed(layer.float_class) else 1)
    return float(output_error(rows, gram.total.to(rows.device)))


@contextmanager
def _rounding(layers: Iterable[QuantMixin]) -> Iterator[None]:
    """Let the quantizers of weights work meanwhile."""
    quantizers = [q for layer in layers if (q := layer.weight_quantizer) is not None]
    for quantizer in quantizers:
        quantizer.enabled = True
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enabled = False


def _divergence(model: nn.Module, calls: Sequence[Any], expected: ActivationStore) -> float:
    """Return the mean over tokens of KL(expected ‖ found), in nats."""
    total, tokens = 0.0, 0
    for index, call in enumerate(calls):
        reference, found = expected[index], _predictions(model, call)
        total += float((reference.exp() * (reference - found)).sum(dtype=torch.float64))
        tokens += len(found)
    return total / max(tokens, 1)


def _predictions(model: nn.Module, call: Any) -> torch.Tensor:
    """Return the logarithms of what a model predicts, (tokens, classes) float32, padding left out.

    Raises:
        ValueError: The model returns no logits.
    """
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        run_batch(model, call)
    finally:
        handle.remove()
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} returned {type(output).__name__} without logits, whose change "
            "tells sensitivities. Pass probes=0, or a model with a head."
        )
    rows, mask = logits.flatten(0, -2), padding_mask(call)
    return (rows if mask is None else rows[mask.flatten().to(rows.device)]).float().log_softmax(-1)
