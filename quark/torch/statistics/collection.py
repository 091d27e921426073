"""Run data through a float model once, and keep all that quantizing it asks of the data.

The sums of x xᵀ over the inputs x of each layer give the squared error of its outputs for any
change of its weight; some of these inputs, what rounding them adds; ranges and histograms of inputs
and outputs, the scales that are settled. It is also measured how much the model's predictions mind
an error: each layer alone is rounded coarsely, and the divergence of the predictions divided by the
squared error of the layer's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.awq import output_error
from quark.torch.algorithm.rescaling import as_rows, block_layers, first_reader, observe_grams
from quark.torch.graph.discovery import discover
from quark.torch.graph.eval_mode import at_inference
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.accumulators import Draw, Gram, Observe
from quark.torch.pipeline.accumulators import observing as watching
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.batches import (
    excerpt,
    padding_mask,
    parts,
    progress,
    repeatable,
    run_batch,
)
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.runner import Block, run_blocks
from quark.torch.pipeline.statistics import Probe, Statistics, data_digest, fingerprint, place
from quark.torch.pipeline.tensor_ranges import TensorRange
from quark.torch.quantization.calibration import observing, settle_weights
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.experts import counterparts, fuse, unfuse
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed
from quark.torch.quantization.preparation import prepare, quantized_layers, restore

PROBES = 8  # calls of the model that each layer is rounded for
COARSE = 64  # weights that share a scale then
TOKENS = 512  # that are kept of what goes into each layer


def collect_statistics(
    model: nn.Module, dataloader: Iterable[Any], probes: int = PROBES
) -> Statistics:
    """Collect what algorithms and searches need to know of a float model and its data.

    Data runs through each decoder block once. After that the first calls of the model are repeated
    for each layer. The sums take 4 · inputs² bytes of main memory for each tensor that linear
    layers of decoder blocks read; tokens up to 2048 · inputs bytes; and each range 32 kB, and 8
    bytes for each channel.

    Args:
        model: A float model, on any device. It is unchanged in the end.
        dataloader: Batches for the model: tensors, mappings of arguments, or lists of these.
        probes: Calls of the model to measure sensitivities on, which a search for mixed precision
            needs; 0 to leave that out.

    Raises:
        ValueError: There is no data, the model has no linear layers in decoder blocks, or what goes
            into one of them or comes out is NaN or infinite.
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
                seen = _observe(model, structure, batches)
                units = _units(model, names)
                calls = list(islice(parts(batches), probes))
                found = _probes(model, units, calls, seen) if calls else {}
        finally:
            restore(model)
    finally:
        fuse(experts)
    ranges = {name: kept for name, kept in seen.ranges.items() if not kept.is_empty}
    tokens = {name: gram.tokens for name, gram in seen.inputs.items()}
    return Statistics(
        digests, data, seen.readers, seen.inputs, tokens, units, found, seen.samples, ranges
    )


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


class _Seen(NamedTuple):
    """What was kept: by the first layers that read a tensor, ranges by ``place``."""

    readers: dict[str, str]
    inputs: dict[str, Gram]
    samples: dict[str, torch.Tensor]
    ranges: dict[str, TensorRange]


def _observe(model: nn.Module, structure: Structure, batches: Iterable[Any]) -> _Seen:
    """Run the data through all blocks."""
    layers = dict(quantized_layers(model))
    settle = partial(settle_weights, config=Config())
    context = Context(model, layers, structure, batches, Config(), settle)
    seen = _Seen({}, {}, {}, {})
    for block in run_blocks(model, structure.blocks, batches, "statistics"):
        inside = block_layers(context, block.name, lambda _: True)
        seen.readers.update({name: first_reader(name, inside, context) for name in inside})
        with _watching(block, inside, seen):
            grams = observe_grams(context, block, inside)
        firsts = dict.fromkeys(seen.readers[name] for name in inside)
        seen.inputs.update({first: grams[first].to("cpu") for first in firsts})
    return seen


@contextmanager
def _watching(block: Block, layers: Mapping[str, QuantMixin], seen: _Seen) -> Iterator[None]:
    """Keep tokens and ranges of the layers of a block while its data runs."""
    firsts = dict.fromkeys(seen.readers[name] for name in layers)
    draws = {first: Draw(TOKENS) for first in firsts}
    inputs = {first: TensorRange() for first in firsts}
    outputs = {name: TensorRange() for name in layers}
    with ExitStack() as stack:
        stack.enter_context(
            watching([(layers[n], d) for n, d in draws.items()], lambda: block.mask)
        )
        into = [(layers[n], _finite(n, "inputs", kept)) for n, kept in inputs.items()]
        stack.enter_context(watching(into, lambda: None))  # ranges are those of padding too
        for name, kept in outputs.items():
            observe = _finite(name, "outputs", kept)
            hook = layers[name].register_forward_hook(
                lambda _, __, y, observe=observe: observe(y.reshape(-1, y.shape[-1]))
            )
            stack.callback(hook.remove)
        yield
    kept_tokens = {name: draw.tokens for name, draw in draws.items()}
    seen.samples.update({n: x.to("cpu") for n, x in kept_tokens.items() if x is not None})
    seen.ranges.update({place(name, "input_tensors"): kept for name, kept in inputs.items()})
    seen.ranges.update({place(name, "output_tensors"): kept for name, kept in outputs.items()})


def _finite(name: str, what: str, kept: TensorRange) -> Observe:
    """Return what takes in (tokens, channels), or raises ``ValueError`` if not all are finite."""

    def observe(x: torch.Tensor) -> None:
        try:
            kept(x)
        except FloatingPointError:
            raise ValueError(
                f"The {what} of {name} were NaN or infinite: check the data, or collect statistics "
                f"in a wider type than {x.dtype}."
            ) from None

    return observe


def _units(model: nn.Module, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the layers by what must share a format: all experts beside each other, else each."""
    stacks = {name: name.rsplit(".", 2)[0] for names in counterparts(model) for name in names}
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(stacks.get(name, name), []).append(name)
    return tuple(tuple(unit) for unit in units.values())


@torch.no_grad()
def _probes(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    calls: Sequence[Any],
    seen: _Seen,
) -> dict[str, Probe]:
    """Round each unit alone, and return what that does, by layer."""
    found: dict[str, Probe] = {}
    with ActivationStore() as expected:
        for index, call in enumerate(calls):
            expected[index] = _predictions(model, call)
        for unit in progress(units, "sensitivities"):
            layers = {name: _layer(model, name) for name in unit}
            settle_weights(layers, Config())
            error = sum(
                weight_error(layer, rounded(layer), seen.inputs[seen.readers[name]])
                for name, layer in layers.items()
            )
            with _rounding(layers.values()):
                lost, tokens = _divergence(model, calls, expected)
            found |= dict.fromkeys(unit, Probe(lost, tokens, error))
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


def _divergence(
    model: nn.Module, calls: Sequence[Any], expected: ActivationStore
) -> tuple[float, int]:
    """Return the sum over tokens of KL(expected ‖ found), in nats, and the number of tokens."""
    total, tokens = 0.0, 0
    for index, call in enumerate(calls):
        reference, found = expected[index], _predictions(model, call)
        total += float((reference.exp() * (reference - found)).sum(dtype=torch.float64))
        tokens += len(found)
    return total, tokens


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
