"""Statistics of the inputs of layers, collected while data runs through a decoder block.

Layers that read the same tensor share one accumulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch

from quark.torch.graph import shared_inputs
from quark.torch.graph.block_selection import is_inside
from quark.torch.pipeline.accumulators import Gram, Sum
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.input_hooks import InputRows, accumulate_inputs, watch_inputs
from quark.torch.pipeline.processes import State
from quark.torch.pipeline.reducer import Mergeable, Reducer
from quark.torch.pipeline.stacks import StopForward
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

Parameters = Mapping[str, torch.Tensor]
TokenWeights = Callable[[int], torch.Tensor | None]  # batch index -> (tokens,) or None


class _Statistics(Mergeable, Protocol):
    """Statistics of the inputs of a layer."""

    def __call__(self, x: torch.Tensor) -> None:
        """Observe (tokens, channels) or (groups, tokens, channels)."""
        ...


T = TypeVar("T", bound=_Statistics)


class Comparison(NamedTuple):
    """Sums over the inputs of a layer in a fold of the data, beside those of the float model.

    The inputs x are those before they are quantized for the product with the weight.

    Attributes:
        square: Sum of x xᵀ, (..., inputs, inputs) float32.
        cross: Sum of (r - x) xᵀ with the inputs r of the float model, in the same shape.
    """

    square: torch.Tensor
    cross: torch.Tensor


def first_readers(names: Iterable[str], context: Context) -> dict[str, str]:
    """Map each layer to the first of the given layers that reads the same tensor.

    Layers that rotate this tensor first form a group of their own, and so do those that multiply it
    by factors.
    """
    names = list(names)
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for name in names:
        layer = context.layers[name]
        kind = layer.input_rotation is not None, layer.input_prescale is not None
        kinds.setdefault(kind, []).append(name)
    groups = context.structure.shared_inputs
    first: dict[str, str] = {}
    for alike in kinds.values():
        first |= shared_inputs.first_readers(alike, groups)
    return {name: first[name] for name in names}


def split_by_input(
    context: Context, layers: Mapping[str, FakeQuantizedLayer]
) -> list[dict[str, FakeQuantizedLayer]]:
    """Divide the layers of a block into sets that read the same tensor, in order of execution.

    Corresponding layers of all experts form one set.
    """
    stacks = {name: names[0] for names in corresponding_experts(context.model) for name in names}
    parts: dict[str, dict[str, FakeQuantizedLayer]] = {}
    for name, first in first_readers(layers, context).items():
        parts.setdefault(stacks.get(first, first), {})[name] = layers[name]
    return list(parts.values())


def observe_block(
    context: Context, block: Block, names: Iterable[str], new: Callable[[int], T]
) -> dict[str, T]:
    """Run the data through a block once and accumulate the inputs of layers.

    Args:
        context: The model.
        block: The block.
        names: Layers of the block.
        new: Returns an empty accumulator for a leaf of the data, given its number.

    Returns:
        Layer to accumulator, the same one for layers that read the same tensor.
    """
    first = first_readers(dict.fromkeys(names), context)
    firsts = list(dict.fromkeys(first.values()))
    reducer = Reducer(firsts, new)

    def observe(name: str, x: torch.Tensor) -> None:
        reducer.parts[name](x)

    observers = [(context.layers[name], partial(observe, name)) for name in firsts]
    with accumulate_inputs(observers):
        for indices in block.reduce(reducer):
            for index in indices:
                block.run_batch(index)
    return {name: reducer.totals[first[name]] for name in first}


def collect_grams(
    context: Context, block: Block, layers: Mapping[str, FakeQuantizedLayer]
) -> dict[str, Gram]:
    """Return the statistics of the inputs of layers, by one pass of the data through their block.

    If the context has stored statistics, these are returned and no data runs.
    """
    if context.grams is not None:
        return context.grams(layers)
    return observe_block(context, block, layers, lambda leaf: Gram())


def collect_input_statistics(
    context: Context,
    block: Block,
    layers: Mapping[str, FakeQuantizedLayer],
    floats: Parameters | None = None,
    to_the_end: bool = False,
    token_weights: TokenWeights = lambda index: None,
    hold_out: bool = False,
) -> tuple[dict[str, Gram], dict[str, list[Comparison]]]:
    """Run each batch through a block until all given layers have received their inputs.

    If the context has stored statistics, these are returned and no data runs.

    Args:
        context: The model.
        block: One of its blocks.
        layers: The layers of the block to observe.
        floats: Parameters of layers in the float model, by name. If given, the second stream runs
            through the block with them.
        to_the_end: Whether the second stream runs through the whole block.
        token_weights: Returns the weight of each token of a batch that is not padding, (tokens,);
            or None for equal weights. Tokens that a router sends to experts have equal weights, and
            so have windows of convolutions.
        hold_out: Whether the sums of one fold of the data are kept apart too (``Gram.held_out``);
            not for experts, whose folds have few tokens.

    Returns:
        The sums of x xᵀ over the inputs x of each layer; and, with two streams, the comparison
        with the inputs of the float model in each fold of the data that reached the layer: its
        leaves by turns, or the first and the second half of the tokens of a single batch. Layers
        that share an input, and round it alike, share these objects. Experts have no comparison,
        since a router may send them other tokens.
    """
    if context.grams is not None:
        return context.grams(layers), {}
    first = _first_alike(first_readers(layers, context), context)
    routed = {name for names in corresponding_experts(context.model) for name in names}
    names = list(dict.fromkeys(first.values()))
    reducer = Reducer(names, lambda leaf: _InputSums())
    windows = {name for name in names if layers[name].is_convolution}
    observer = _InputObserver(reducer, routed, routed | windows, hold_out)
    observers = [(layers[name], partial(observer, name)) for name in names]
    with watch_inputs(observers):
        for index in (index for indices in block.reduce(reducer) for index in indices):
            if floats is not None:
                observer.begin(is_reference=True, to_the_end=to_the_end)
                with (
                    _replaced_parameters(context, floats),
                    quantize_inputs(context, block.name, False),
                ):
                    block.run_reference(index)
            observer.begin(False, token_weights=token_weights(index), fold=block.fold(index))
            block.observe(index)
            if index == 0:  # a pass stops early only if each layer runs exactly once in it
                observer.stops_early = all(observer.calls[name] == 1 for name in names)
    grams = {name: reducer.totals[name].gram() for name in names}
    compared = {name: reducer.totals[name].comparisons() for name in names}
    comparisons = {name: compared[f] for name, f in first.items() if compared[f]}
    return {name: grams[f] for name, f in first.items()}, comparisons


def _first_alike(first: Mapping[str, str], context: Context) -> dict[str, str]:
    """Map each layer to the first one that reads the same tensor and rounds it alike."""
    found: dict[str, list[str]] = {}
    result = {}
    for name, reader in first.items():
        spec = context.layers[name].quant_config.input_tensors
        others = found.setdefault(reader, [])
        alike = (n for n in others if context.layers[n].quant_config.input_tensors == spec)
        result[name] = next(alike, name)
        if result[name] == name:
            others.append(name)
    return result


class _InputSums:
    """Sums over the inputs of a layer.

    Attributes:
        grams: Sums of x xᵀ and |x| over the inputs x, for each fold; all in the first one where
            no fold is held out.
        squares: Sum of x xᵀ over the inputs before they are quantized, for each fold.
        crosses: Sum of (r - x) xᵀ with these and the inputs r of the float model, for each fold.
        noise: Sum of what rounding adds to the inputs.
    """

    def __init__(self) -> None:
        self.grams = Gram(), Gram()
        self.squares, self.crosses = (Sum(), Sum()), (Sum(), Sum())
        self.noise = Sum()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return all(gram.is_empty for gram in self.grams)

    def gram(self) -> Gram:
        """Return the sums over all folds, which are forgotten."""
        first, second = self.grams
        held_out = None if first.is_empty else second.total
        first.merge(second)
        first.held_out, first.noise = held_out, self.noise.total
        self.grams = first, Gram()
        return first

    def add(self, fold: int | None, x: torch.Tensor) -> None:
        """Add an input x, (..., tokens, inputs), of a fold; None: one half to each."""
        if fold is None:
            for number, part in enumerate(x.tensor_split(2, dim=-2)):
                self.grams[number](part)
        else:
            self.grams[fold](x)

    def add_noise(self, rows: InputRows) -> None:
        """Add what rounding has added to an input."""
        for x, before in zip(rows.pieces(), rows.before_rounding().pieces(), strict=True):
            self.noise.add((x.float() - before.float()).sum(-2))

    def add_comparison(self, fold: int | None, r: torch.Tensor, x: torch.Tensor) -> None:
        """Add an input x and that of the float model, which is r, (..., tokens, inputs) each."""
        if fold is None:
            for number, parts in enumerate(
                zip(r.tensor_split(2, dim=-2), x.tensor_split(2, dim=-2), strict=True)
            ):
                self.add_comparison(number, *parts)
            return
        self.squares[fold].add_gram(x)
        self.crosses[fold].add_product(r - x, x)

    def comparisons(self) -> list[Comparison]:
        """Return the comparisons in the folds that have any."""
        pairs = zip(self.squares, self.crosses, strict=True)
        totals = ((square.total, cross.total) for square, cross in pairs)
        return [Comparison(s, c) for s, c in totals if s is not None and c is not None]

    def _sums(self) -> list[Sum]:
        return [*self.squares, *self.crosses, self.noise]

    def merge(self, other: _InputSums) -> None:
        """Add other sums."""
        for mine, theirs in zip(self.grams, other.grams, strict=True):
            mine.merge(theirs)
        for own, others in zip(self._sums(), other._sums(), strict=True):
            own.merge(others)

    def tensors(self) -> State:
        """Return all sums."""
        parts: list[Sum | Gram] = [*self._sums(), *self.grams]
        return tuple(tensor for part in parts for tensor in part.tensors())

    def set_tensors(self, tensors: State) -> None:
        """Replace all sums."""
        sums = self._sums()
        for part, tensor in zip(sums, tensors, strict=False):
            part.set_tensors([tensor])
        first, second = self.grams
        first.set_tensors(tensors[len(sums) : -3])
        second.set_tensors(tensors[-3:])


class _InputObserver:
    """Accumulates inputs of layers in two streams, and ends a pass when all have received theirs.

    Args:
        reducer: The sums by name of the layer.
        routed: Layers of experts, whose tokens a router chooses.
        unweighted: Layers whose tokens have equal weights.
        hold_out: Whether the folds of layers that are not routed are summed apart.

    Attributes:
        calls: Number of inputs of each layer in this pass.
        stops_early: Whether a pass ends as soon as each layer has received an input.
    """

    def __init__(
        self,
        reducer: Reducer[_InputSums],
        routed: Container[str],
        unweighted: Container[str],
        hold_out: bool,
    ) -> None:
        self._reducer, self._unweighted, self._hold_out = reducer, unweighted, hold_out
        self.calls: Counter[str] = Counter()
        self.stops_early = False
        self._routed, self._references = routed, dict[str, list[InputRows]]()
        self._is_reference = self._to_the_end = False
        self._roots: torch.Tensor | None = None
        self._fold: int | None = None

    def begin(
        self,
        is_reference: bool,
        to_the_end: bool = False,
        token_weights: torch.Tensor | None = None,
        fold: int | None = None,
    ) -> None:
        """Begin a pass of the second stream (``is_reference``) or of the first."""
        self._is_reference, self._to_the_end, self._fold = is_reference, to_the_end, fold
        self._roots = None if token_weights is None else token_weights.sqrt().unsqueeze(1)
        self.calls.clear()
        if is_reference:
            self._references.clear()

    def __call__(self, name: str, rows: InputRows) -> None:
        """Accumulate an input."""
        self.calls[name] += 1
        sums = self._reducer.parts
        if self._is_reference:
            self._references.setdefault(name, []).append(rows.copy())
        else:
            fold = self._fold if self._hold_out and name not in self._routed else 0
            for x in rows.pieces():
                sums[name].add(fold, self._weigh(name, x))
            if rows.is_rounded and rows.layer.is_linear:
                sums[name].add_noise(rows)
            # A layer may run several times in a pass: each run is compared with its own.
            if name not in self._routed and self._references.get(name):
                references = self._references[name].pop(0).pieces()
                for x, r in zip(rows.before_rounding().pieces(), references, strict=True):
                    weighed = (self._weigh(name, y.float()) for y in (r, x))
                    sums[name].add_comparison(self._fold, *weighed)
        if self.stops_early and len(self.calls) == len(sums) and not self._to_the_end:
            raise StopForward

    def _weigh(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Multiply tokens by the square roots of their weights, unless these are equal."""
        if self._roots is None or name in self._unweighted or len(self._roots) != len(x):
            return x
        return x * self._roots


@contextmanager
def quantize_inputs(context: Context, block: str, enabled: bool = True) -> Iterator[None]:
    """Switch the quantization of the inputs of all layers of a block on or off inside the context.

    Quantizers with static ranges stay off: these ranges are calibrated later.
    """
    inside = (m for name, m in context.layers.items() if is_inside(name, block))
    with quantize_inputs_of(inside, enabled):
        yield


@contextmanager
def quantize_inputs_of(
    layers: Iterable[FakeQuantizedLayer], enabled: bool = True
) -> Iterator[None]:
    """Switch the quantization of the inputs of layers on or off; see ``quantize_inputs``."""
    quantizers = [q for m in layers if (q := m.input_quantizer) is not None and not q.needs_data]
    before = [q.enabled for q in quantizers]
    for quantizer in quantizers:
        quantizer.enabled = enabled
    try:
        yield
    finally:
        for quantizer, was_enabled in zip(quantizers, before, strict=True):
            quantizer.enabled = was_enabled


@contextmanager
def _replaced_parameters(context: Context, values: Parameters) -> Iterator[None]:
    """Replace the values of parameters inside the context."""
    parameters = {name: context.model.get_parameter(name) for name in values}
    own = {name: parameter.data for name, parameter in parameters.items()}
    for name, value in values.items():
        parameters[name].data = value
    try:
        yield
    finally:
        for name, value in own.items():
            parameters[name].data = value
