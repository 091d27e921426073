"""Collect statistics of a float model and its data once, for any number of quantization runs.

- The sums of x xᵀ over the inputs x of each layer give the squared error of its outputs under any
  change of its weight.
- A sample of these inputs gives the error of rounding them.
- Ranges and histograms of inputs and outputs give static ranges.
- Sensitivities relate errors to predictions: each layer alone is rounded coarsely, and the KL
  divergence of the predictions is divided by the squared error of the outputs of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from quark.torch.algorithm.layer_inputs import collect_grams, first_readers
from quark.torch.algorithm.layers import block_layers, to_matrix
from quark.torch.graph.alignment import align_parameters
from quark.torch.graph.discovery import discover
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.plain_mode import plain_mode
from quark.torch.graph.quantized_mark import marked
from quark.torch.graph.residency import residency_of
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.accumulators import Gram, TokenSample
from quark.torch.pipeline.activation_store import activation_limit, offload_directory
from quark.torch.pipeline.batches import (
    flatten_batches,
    run_batch,
    take_excerpt,
)
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.chunks import Chunks
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.data_source import check_batches, make_repeatable
from quark.torch.pipeline.input_hooks import Accumulator, accumulate_inputs
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.statistics import (
    Statistics,
    data_digest,
    model_digests,
    tensor_key,
)
from quark.torch.pipeline.tensor_ranges import TensorRange
from quark.torch.quantization.calibration import compute_weight_scales, disabled_quantizers
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import corresponding_experts, temporarily_split_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import input_axis, is_linear
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.nn.padding import without_padding
from quark.torch.quantization.observer.histogram import BINS
from quark.torch.quantization.preparation import (
    check_parameters,
    quantized_layers,
    replace_layers,
    restore_layers,
)
from quark.torch.quantization.sequence_rows import keep_rows_together
from quark.torch.statistics.sensitivities import (
    PROBES,
    Probes,
    coarse_spec,
    first_pieces,
    measure_probes,
)

_RANGE = 2 * BINS * 8  # bytes of a histogram
TOKENS = 512  # size of the sample of inputs of each layer


def collect_statistics(
    model: nn.Module,
    dataloader: Iterable[Any],
    probes: int = PROBES,
    offload_dir: str | Path | None = None,
    check_size: Callable[[int], None] | None = None,
) -> Statistics:
    """Collect the statistics of a float model that algorithms and searches need.

    Data runs through each decoder block once. Then the first tokens of the data run again for
    each layer, from its block on. Main memory holds 4 · inputs² bytes of sums and up to 2048 ·
    inputs bytes of tokens for each tensor that linear layers of decoder blocks read, 32 kB for each
    range, and 8 bytes for each channel.

    Args:
        model: A float model, on any device. It is unchanged afterwards.
        dataloader: Batches for the model: tensors, mappings of arguments, or lists of these.
        probes: Number of times that 128 tokens of the data are predicted for sensitivities, and 512
            run through single blocks. Only a search for mixed precision needs them; 0 measures
            none.
        offload_dir: Directory for activations that do not fit into memory; None for that of
            temporary files.
        check_size: Called before the data runs, with the bytes that ``save_statistics`` will write
            at most. It raises if they have no room.

    Raises:
        OSError: The disk is too full for activations, or there is no ``offload_dir``.
        ValueError: There is no data, the model is a graph or has no linear layers in decoder
            blocks, or an input or output of one is NaN or infinite.
    """
    _check_network(model)
    batches = make_repeatable(dataloader)
    if not check_batches(model, batches):
        raise ValueError("The dataloader is empty: statistics need at least a batch.")
    digests, data = model_digests(model), data_digest(batches)
    align_parameters(model)
    batches = keep_rows_together(model, batches)
    first = next(iter(flatten_batches(batches)))
    with plain_mode(model), marked(model), temporarily_split_experts(model):
        check_parameters(model)
        structure = discover(model, lambda: run_batch(model, take_excerpt(first)))
        names = list(_find_linear_layers(model, structure))
        if not names:
            raise ValueError(_describe_refusal(model))
        replace_layers(
            model, {name: _make_coarse_config(model.get_submodule(name)) for name in names}
        )
        try:
            with _prepared(model, offload_dir):
                inputs = _observe(model, structure, Chunks(batches), check_size)
                units = _group_units(model, names)
                pieces = first_pieces(batches, probes)
                grams = {name: inputs.grams[first] for name, first in inputs.readers.items()}
                measured = measure_probes(model, structure.blocks, units, pieces, grams)
        finally:
            restore_layers(model)
    return inputs.assemble(digests, data, units, measured)


@contextmanager
def _prepared(model: nn.Module, offload_dir: str | Path | None) -> Iterator[None]:
    """Let data run through a float model with its bounds of memory, while the context is open."""
    residency = residency_of(model)
    with (
        offload_directory(offload_dir),
        activation_limit(None if residency is None else residency.activation_limit),
        disabled_quantizers(model),
        eval_mode(model),
    ):
        yield


def _check_network(model: nn.Module) -> None:
    """Raise ValueError if a model cannot have statistics: a graph, or one without linear layers."""
    if isinstance(model, GraphModule) or not any(is_linear(type(m)) for m in model.modules()):
        raise ValueError(_describe_refusal(model))


def _describe_refusal(model: nn.Module) -> str:
    """Return why a model has no statistics, and what works instead."""
    is_graph = isinstance(model, GraphModule)
    what = "is a graph" if is_graph else "has no linear layers in decoder blocks"
    return (
        f"{type(model).__name__} {what}: statistics are collected for linear layers in the decoder "
        "blocks of a model alone. Convolutions and graphs need no statistics: pass the dataloader "
        "to quantize_model, which computes ranges and applies every algorithm with it."
    )


def _find_linear_layers(model: nn.Module, structure: Structure) -> Iterator[str]:
    blocks = tuple(f"{block}." for block in structure.blocks)
    for name, module in model.named_modules():
        is_plain = is_linear(type(module)) and is_operator_module(module)
        if is_plain and name.startswith(blocks):
            yield name


def _make_coarse_config(layer: Any) -> QuantizationConfig:
    """Return a configuration that rounds the weight of a layer to two bits."""
    inputs = layer.weight.shape[input_axis(type(layer))]
    return QuantizationConfig(weight=coarse_spec(inputs))


class _Activations(NamedTuple):
    """Statistics of inputs and outputs while they are collected; see ``Statistics``.

    Attributes:
        readers: Layer to the first of the layers that read the same tensor.
        grams: Sums by first reader.
        samples: Tokens by first reader.
        ranges: Ranges by ``tensor_key``.
    """

    readers: dict[str, str]
    grams: dict[str, Gram]
    samples: dict[str, torch.Tensor]
    ranges: dict[str, TensorRange]

    def assemble(
        self,
        digests: Mapping[str, str],
        data: str,
        units: tuple[tuple[str, ...], ...],
        measured: Probes,
    ) -> Statistics:
        """Return the statistics; see there."""
        return Statistics(
            digests,
            data,
            self.readers,
            self.grams,
            {name: gram.tokens for name, gram in self.grams.items()},
            units,
            measured.coarse,
            self.samples,
            {key: tensor for key, tensor in self.ranges.items() if not tensor.is_empty},
            fine_probes=measured.fine,
        )


def _size_on_disk(context: Context) -> int:
    """Return the bytes of the tensors of all statistics, if every layer receives enough tokens."""
    size = 0
    for block in context.structure.blocks:
        inside = block_layers(context, block, lambda _: True)
        for name, first in first_readers(inside, context).items():
            weight = to_matrix(context.layers[name].weight, context.layers[name].input_axis)
            outputs, inputs = weight.shape
            size += _RANGE + 8 * outputs
            if name == first:
                size += 4 * inputs * (inputs + 1) + TOKENS * inputs * weight.itemsize
                size += _RANGE + 8 * inputs
    return size


def _observe(
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Any],
    check_size: Callable[[int], None] | None,
) -> _Activations:
    """Run the data through all decoder blocks."""
    layers = dict(quantized_layers(model))
    compute_scales = partial(compute_weight_scales, config=Config())
    context = Context(model, layers, structure, batches, Config(), compute_scales)
    if check_size is not None:
        check_size(_size_on_disk(context))
    activations = _Activations({}, {}, {}, {})
    for block in run_blocks(model, structure.blocks, batches, "statistics"):
        inside = block_layers(context, block.name, lambda _: True)
        activations.readers.update(first_readers(inside, context))
        with _observe_ranges(block, inside, activations):
            grams = collect_grams(context, block, inside)
        firsts = dict.fromkeys(activations.readers[name] for name in inside)
        activations.grams.update({first: grams[first].to("cpu") for first in firsts})
    return activations


@contextmanager
def _observe_ranges(
    block: Block, layers: Mapping[str, FakeQuantizedLayer], activations: _Activations
) -> Iterator[None]:
    """Add samples and ranges of the layers of a block while its data runs inside the context."""
    firsts = dict.fromkeys(activations.readers[name] for name in layers)
    samples = {first: TokenSample(TOKENS) for first in firsts}
    inputs = {first: TensorRange() for first in firsts}
    outputs = {name: TensorRange() for name in layers}
    with ExitStack() as stack:
        observers = [(layers[name], sample) for name, sample in samples.items()]
        stack.enter_context(accumulate_inputs(observers))
        ranges = [(layers[n], _check_finite(n, "inputs", tensor)) for n, tensor in inputs.items()]
        stack.enter_context(accumulate_inputs(ranges))
        for name, tensor in outputs.items():
            observe = _check_finite(name, "outputs", tensor)
            hook = layers[name].register_forward_hook(
                lambda _, __, y, observe=observe: observe(
                    without_padding(y).reshape(-1, y.shape[-1])
                )
            )
            stack.callback(hook.remove)
        yield
    tokens = {name: sample.tokens for name, sample in samples.items()}
    activations.samples.update({n: x.to("cpu") for n, x in tokens.items() if x is not None})
    for key, tensors in (("input_tensors", inputs), ("output_tensors", outputs)):
        activations.ranges.update({tensor_key(n, key): tensor for n, tensor in tensors.items()})


def _check_finite(name: str, tensor: str, target: TensorRange) -> Accumulator:
    """Return an observer of (tokens, channels) that raises ``ValueError`` unless all are finite."""

    def observe(x: torch.Tensor) -> None:
        try:
            target(x)
        except FloatingPointError:
            raise ValueError(
                f"The {tensor} of {name} were NaN or infinite: check the data, or collect "
                f"statistics in a wider type than {x.dtype}."
            ) from None

    return observe


def _group_units(model: nn.Module, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the layers in units that share a format: all experts of a layer, or one layer each."""
    stacks = {
        name: name.rsplit(".", 2)[0] for names in corresponding_experts(model) for name in names
    }
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(stacks.get(name, name), []).append(name)
    return tuple(tuple(unit) for unit in units.values())
