"""The inputs of the layers of a block, as they become, and beside those of the float model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from quark.torch.algorithm.rescaling import first_reader
from quark.torch.pipeline.accumulators import Gram, observing
from quark.torch.pipeline.capture import Enough
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.runner import Block
from quark.torch.quantization.nn.experts import counterparts
from quark.torch.quantization.nn.layer import QuantMixin

Weights = Mapping[str, torch.Tensor]
TokenWeights = Callable[[int], torch.Tensor | None]


def observe_inputs(
    context: Context,
    block: Block,
    layers: Mapping[str, QuantMixin],
    floats: Weights | None = None,
    to_the_end: bool = False,
    weights: TokenWeights = lambda index: None,
) -> tuple[dict[str, Gram], dict[str, torch.Tensor]]:
    """Send the data through a block until all layers have seen their inputs.

    Layers that read the same tensor share what is returned.

    Args:
        context: The model.
        block: One of its blocks.
        layers: The layers of the block to look at.
        floats: Weights of its layers in the float model, to send the second stream through it too.
        to_the_end: Whether the second stream is to pass the whole block.
        weights: Returns how much each token of a batch counts that is not padding, (tokens,); None
            for all alike. Tokens that a router sends to experts count alike.

    Returns:
        Statistics of the inputs x of each layer; and, with two streams, the sum of (r - x) xᵀ with
        the inputs r of the float model, (inputs, inputs) float32. Experts have none: a router may
        send them other tokens. Where statistics were kept, they are returned and nothing runs.
    """
    if context.grams is not None:
        return context.grams(layers), {}
    firsts = {name: first_reader(name, layers, context) for name in layers}
    routed = {name for names in counterparts(context.model) for name in names}
    seen = _Seen(dict.fromkeys(firsts.values()), routed)
    observers = [(layers[first], partial(seen, first)) for first in seen.grams]
    with observing(observers, lambda: block.mask):
        for index in range(len(block)):
            if floats is not None:
                seen.begin(is_reference=True, to_the_end=to_the_end)
                with _holding(context, floats), rounding_inputs(context, block.name, False):
                    block.refer(index)
            seen.begin(is_reference=False, weights=weights(index))
            block.look(index)
            if index == 0:  # layers that run several times, or not always, are waited for
                seen.stops = [seen.times[first] for first in seen.grams] == [1] * len(seen.grams)
    crosses = {n: seen.crosses[first] for n, first in firsts.items() if first in seen.crosses}
    return {name: seen.grams[first] for name, first in firsts.items()}, crosses


class _Seen:
    """Takes in the inputs of layers, and ends a pass when all have seen theirs."""

    def __init__(self, firsts: Iterable[str], routed: Container[str]) -> None:
        self.grams = {first: Gram() for first in firsts}
        self.crosses: dict[str, torch.Tensor] = {}
        self.times: Counter[str] = Counter()
        self.stops = False
        self._routed, self._references = routed, dict[str, torch.Tensor]()
        self._is_reference = self._to_the_end = False
        self._roots: torch.Tensor | None = None

    def begin(
        self,
        is_reference: bool,
        to_the_end: bool = False,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Begin a pass."""
        self._is_reference, self._to_the_end = is_reference, to_the_end
        self._roots = None if weights is None else weights.sqrt().unsqueeze(1)
        self.times.clear()

    def __call__(self, first: str, x: torch.Tensor) -> None:
        """Take in (tokens, channels)."""
        self.times[first] += 1
        if self._is_reference:
            self._references[first] = x
        else:
            roots = self._roots_of(first, x)
            self.grams[first](x if roots is None else x * roots)
            r = self._references.pop(first, None)
            if r is not None and first not in self._routed:
                self._compare(first, r.float(), x.float(), roots)
        if self.stops and len(self.times) == len(self.grams) and not self._to_the_end:
            raise Enough

    def _roots_of(self, first: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return what tokens are multiplied with to count as much as they should."""
        if self._roots is None or first in self._routed or len(self._roots) != len(x):
            return None
        return self._roots

    def _compare(
        self, first: str, r: torch.Tensor, x: torch.Tensor, roots: torch.Tensor | None
    ) -> None:
        if first not in self.crosses:
            self.crosses[first] = x.new_zeros(x.shape[1], x.shape[1])
        lost = r - x
        if roots is not None:
            lost, x = lost * roots, x * roots
        self.crosses[first].addmm_(lost.T, x)


def in_turn(context: Context, layers: Mapping[str, QuantMixin]) -> list[dict[str, QuantMixin]]:
    """Divide layers of a block into those that see the same inputs; experts are taken as one."""
    routed = {name: names[0] for names in counterparts(context.model) for name in names}
    turns: dict[str, dict[str, QuantMixin]] = {}
    for name, layer in layers.items():
        first = first_reader(name, layers, context)
        turns.setdefault(routed.get(first, first), {})[name] = layer
    return list(turns.values())


@contextmanager
def rounding_inputs(context: Context, block: str, wanted: bool = True) -> Iterator[None]:
    """Let the layers of a block quantize their inputs for a while, or not.

    Those that are quantized by settled ranges are not: these are settled later.
    """
    inside = (m for name, m in context.layers.items() if name.startswith(f"{block}."))
    quantizers = [q for m in inside if (q := m.input_quantizer) is not None and not q.needs_data]
    before = [q.enabled for q in quantizers]
    for quantizer in quantizers:
        quantizer.enabled = wanted
    try:
        yield
    finally:
        for quantizer, enabled in zip(quantizers, before, strict=True):
            quantizer.enabled = enabled


@contextmanager
def _holding(context: Context, weights: Weights) -> Iterator[None]:
    """Give layers other weights for a while."""
    own = {name: context.layers[name].weight.data for name in weights}
    for name, weight in weights.items():
        context.layers[name].weight.data = weight
    try:
        yield
    finally:
        for name, weight in own.items():
            context.layers[name].weight.data = weight
