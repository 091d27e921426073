"""Sizes of a model in a mixture of formats: bytes of its files, and bytes that a token reads.

To generate a token, the weights that it passes are read from memory once: all of a dense layer, and
of experts those that the router chooses. One row of an embedding table is read, which counts as
nothing. At a batch size of 1, the time of a token is about these bytes divided by the bandwidth.

Example of a layer with 8 experts, of which a token passes 2: a byte of each expert adds 8 bytes to
the files and 2 to what a token reads. So small formats for experts make the files smaller, and
small formats for attention make tokens faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from torch import nn

from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.config.parts import output_layers
from quark.torch.quantization.config.resolution import output_head, resolve_exclude
from quark.torch.quantization.nn.experts import temporarily_split_experts
from quark.torch.quantization.nn.layer import input_axis, is_linear
from quark.torch.search.costs import Unit, find_problem, stored_bits


class Size(NamedTuple):
    """Size of a model, in bytes.

    Attributes:
        stored: Bytes of its tensors.
        read: Bytes of its tensors that a token reads.
    """

    stored: int
    read: int


def read_shares(statistics: Statistics) -> dict[str, float]:
    """Return the share of the tokens that read a layer, by layer; the same for all of its experts.

    Args:
        statistics: Statistics of the model, with the tokens that reached each layer.
    """

    def tokens(name: str) -> float:
        return statistics.tokens[statistics.readers[name]]

    dense = [unit[0] for unit in statistics.units if len(unit) == 1]
    shares = dict.fromkeys(dense, 1.0)
    for unit in statistics.units:
        if len(unit) > 1:
            near = max(dense, key=partial(_shared_parts, unit[0]), default=None)
            every = 0.0 if near is None else len(unit) * tokens(near)
            share = sum(map(tokens, unit)) / every if every else 1.0
            shares |= dict.fromkeys(unit, min(share, 1.0))
    return shares


def _shared_parts(one: str, other: str) -> int:
    """Return the number of leading parts of two names that are equal."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def candidate_layers(model: nn.Module, exclude: Iterable[str] = ()) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers of a model that may get a format, by name.

    Args:
        model: A float model, with experts split.
        exclude: Patterns of layers to leave out, beside the output head.
    """
    patterns, heads = resolve_exclude(list(exclude), model), output_head(model)
    shapes = {}
    for name, module in model.named_modules():
        if is_linear(type(module)) and name not in heads and not matches(name, patterns):
            shape, axis = model.get_parameter(f"{name}.weight").shape, input_axis(type(module))
            shapes[name] = (shape[1 - axis], shape[axis])
    return shapes


def reachable_bits(
    model: nn.Module, formats: Mapping[str, QuantizationConfig], exclude: Iterable[str] = ()
) -> tuple[float, float]:
    """Return the least and the most bits per weight of any layer in any format that fits it.

    Args:
        model: The float model; the values of its parameters are not read.
        formats: Configurations of a layer by name of the format.
        exclude: Patterns of layers to leave out, beside the output head.

    Raises:
        ValueError: No format fits any layer.
    """
    with temporarily_split_experts(model):
        bits = [
            _bits_per_weight(model, name, config)
            for name in candidate_layers(model, exclude)
            for config in formats.values()
            if find_problem(model, [name], config) is None
        ]
    if not bits:
        raise ValueError(f"None of {', '.join(formats)} fits a layer: give other formats.")
    return min(bits), max(bits)


def _bits_per_weight(model: nn.Module, name: str, config: QuantizationConfig) -> float:
    weight = model.get_parameter(f"{name}.weight")
    is_transposed = input_axis(type(model.get_submodule(name))) == 0
    return stored_bits(config, tuple(weight.shape), is_transposed) / weight.numel()


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of the tensors of a model, those that have two names once."""
    tensors = model.state_dict(keep_vars=True).values()
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def size_outside(model: nn.Module, statistics: Statistics, units: Sequence[Unit]) -> Size:
    """Return the size of what no unit holds: other layers, norms, biases, embeddings.

    Args:
        model: The float model. It is unchanged afterwards.
        statistics: Its statistics.
        units: The result of ``measure_costs``.
    """
    shares = read_shares(statistics)
    weights = {f"{layer}.weight" for unit in units for layer in unit.layers}
    heads = {id(layer.weight) for layer in output_layers(model)}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - heads
    stored, read = 0, 0.0
    with temporarily_split_experts(model):
        tensors = model.state_dict(keep_vars=True)
        once = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
        for name, tensor in once.values():
            if name not in weights:
                stored += tensor.nbytes
                share = shares.get(name.rpartition(".")[0], 1.0)
                read += 0 if id(tensor) in tables else share * tensor.nbytes
    return Size(stored, round(read))


def stored_bits_per_weight(units: Sequence[Unit], chosen: Mapping[str, str]) -> float:
    """Return the bits per weight of quantized units in the files, scales included.

    Args:
        units: The units.
        chosen: Format of each layer, by its name.
    """
    bits = sum(unit.bits[chosen[unit.layers[0]]] for unit in units)
    return bits / sum(unit.weights for unit in units)


def size_of_mixture(units: Sequence[Unit], chosen: Mapping[str, str], outside: Size) -> Size:
    """Return the size of a model with quantized units.

    Args:
        units: The units.
        chosen: Format of each layer, by its name.
        outside: Size of everything else; see ``size_outside``.
    """
    bits = [(unit.bits[chosen[unit.layers[0]]], unit.share) for unit in units]
    read = sum(count * share for count, share in bits) / 8
    return Size(outside.stored + sum(count for count, _ in bits) // 8, outside.read + round(read))
