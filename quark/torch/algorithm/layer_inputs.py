"""Statistics of the inputs of layers, collected while data runs through a decoder block.

Layers that read the same tensor share one accumulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Protocol, TypeVar

import torch

from quark.torch.graph import shared_inputs
from quark.torch.graph.block_selection import is_inside
from quark.torch.pipeline.accumulators import Gram, Sum
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.capture import StopForward
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.input_hooks import InputRows, accumulate_inputs, watch_inputs
from quark.torch.pipeline.processes import State
from quark.torch.pipeline.reducer import Mergeable, Reducer
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
) -> tuple[dict[str, Gram], dict[str, torch.Tensor]]:
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

    Returns:
        The sums of x xᵀ over the inputs x of each layer; and, with two streams, the sums of
        (r - x) xᵀ with the inputs r of the float model, (..., inputs, inputs) float32. Experts have
        no such sum, since a router may send them other tokens.
    """
    if context.grams is not None:
        return context.grams(layers), {}
    first = first_readers(layers, context)
    routed = {name for names in corresponding_experts(context.model) for name in names}
    names = list(dict.fromkeys(first.values()))
    reducer = Reducer(names, lambda leaf: _InputSums())
    windows = {name for name in names if layers[name].is_convolution}
    observer = _InputObserver(reducer, routed, routed | windows)
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
            observer.begin(is_reference=False, token_weights=token_weights(index))
            block.observe(index)
            if index == 0:  # a pass stops early only if each layer runs exactly once in it
                observer.stops_early = all(observer.calls[name] == 1 for name in names)
    sums = {name: reducer.totals[f] for name, f in first.items()}
    crosses = {n: s.cross.total for n, s in sums.items() if s.cross.total is not None}
    return {name: s.gram for name, s in sums.items()}, crosses


class _InputSums:
    """Sums over the inputs of a layer.

    Attributes:
        gram: Sums of x xᵀ and |x| over the inputs x.
        cross: Sum of (r - x) xᵀ with the inputs r of the float model.
    """

    def __init__(self) -> None:
        self.gram, self.cross = Gram(), Sum()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return self.gram.is_empty

    def merge(self, other: _InputSums) -> None:
        """Add other sums."""
        self.gram.merge(other.gram)
        self.cross.merge(other.cross)

    def tensors(self) -> State:
        """Return all sums."""
        return *self.cross.tensors(), *self.gram.tensors()

    def set_tensors(self, tensors: State) -> None:
        """Replace all sums."""
        self.cross.set_tensors(tensors[:1])
        self.gram.set_tensors(tensors[1:])


class _InputObserver:
    """Accumulates inputs of layers in two streams, and ends a pass when all have received theirs.

    Args:
        reducer: The sums by name of the layer.
        routed: Layers of experts, whose tokens a router chooses.
        unweighted: Layers whose tokens have equal weights.

    Attributes:
        calls: Number of inputs of each layer in this pass.
        stops_early: Whether a pass ends as soon as each layer has received an input.
    """

    def __init__(
        self, reducer: Reducer[_InputSums], routed: Container[str], unweighted: Container[str]
    ) -> None:
        self._reducer, self._unweighted = reducer, unweighted
        self.calls: Counter[str] = Counter()
        self.stops_early = False
        self._routed, self._references = routed, dict[str, list[InputRows]]()
        self._is_reference = self._to_the_end = False
        self._roots: torch.Tensor | None = None

    def begin(
        self,
        is_reference: bool,
        to_the_end: bool = False,
        token_weights: torch.Tensor | None = None,
    ) -> None:
        """Begin a pass of the second stream (``is_reference``) or of the first."""
        self._is_reference, self._to_the_end = is_reference, to_the_end
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
            # A layer may run several times in a pass: each run is compared with its own.
            waiting = self._references.get(name, []) if name not in self._routed else []
            references = waiting.pop(0).pieces() if waiting else iter(())
            for x, r in zip_longest(rows.pieces(), references):
                roots = self._roots_of(name, x)
                sums[name].gram(x if roots is None else x * roots)
                if r is not None:
                    _add_cross(sums[name].cross, r.float(), x.float(), roots)
        if self.stops_early and len(self.calls) == len(sums) and not self._to_the_end:
            raise StopForward

    def _roots_of(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return the square roots of the weights of tokens, (tokens, 1); None for equal weights."""
        if self._roots is None or name in self._unweighted or len(self._roots) != len(x):
            return None
        return self._roots


def _add_cross(
    total: Sum, reference: torch.Tensor, x: torch.Tensor, roots: torch.Tensor | None
) -> None:
    difference = reference - x
    if roots is not None:
        difference, x = difference * roots, x * roots
    total.add_product(difference, x)


@contextmanager
def quantize_inputs(context: Context, block: str, enabled: bool = True) -> Iterator[None]:
    """Switch the quantization of the inputs of all layers of a block on or off inside the context.

    Quantizers with static ranges stay off: these ranges are calibrated later.
    """
    inside = (m for name, m in context.layers.items() if is_inside(name, block))
    quantizers = [q for m in inside if (q := m.input_quantizer) is not None and not q.needs_data]
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
