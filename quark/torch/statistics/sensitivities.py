"""Sensitivities: what the predictions of a model lose if the weights of one unit are rounded.

A unit is a layer, or all experts of a layer. A few units are measured; what others lose follows
from the errors of the outputs of their blocks (``block_errors``, ``divergence_ratios``). A call
that measures a unit begins at the block of the unit: earlier blocks return what they returned in
the unchanged model, and do not compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.evaluation.output_head import OutputHead
from quark.torch.graph.replay import replace_forwards
from quark.torch.graph.residency import resident
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import padding_mask, run_batch, show_progress, take_excerpt
from quark.torch.pipeline.statistics import Probe
from quark.torch.quantization.calibration import compute_weight_scales
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.statistics.block_errors import BlockErrors, Unit
from quark.torch.statistics.divergence_ratios import block_of, choose_units, divergence_ratios

logger = logging.getLogger(__name__)

PROBES = 2  # default number of model calls on which sensitivities are measured
LONG = 10.0  # seconds from which on the time is told
_OTHER_TOKENS = 8  # of an excerpt that is shorter than another

Receive = Callable[[torch.Tensor], None]  # takes log-probabilities, (tokens, classes) float32


class Probes(NamedTuple):
    """The effect of rounding each unit alone to two bits, and to four, by layer."""

    coarse: dict[str, Probe]
    fine: dict[str, Probe]


@torch.no_grad()
def measure_probes(
    model: nn.Module,
    blocks: Sequence[str],
    errors: Mapping[Unit, BlockErrors],
    calls: Sequence[Any],
) -> Probes:
    """Return the effect of rounding each unit alone, by layer.

    The divergence of predictions is measured for a few units at two bits. All others follow from
    the errors of the outputs of blocks.

    Args:
        model: The model, whose layers have quantizers of weights that are switched off.
        blocks: Its blocks in the order of execution.
        errors: Unit to its effect on its block, in the order of blocks; may be empty.
        calls: Data of the calls that are measured.
    """
    probes = Probes({}, {})
    if not errors:
        return probes
    coarse = {unit: both.coarse.relative for unit, both in errors.items()}
    measured, tokens = _measure(model, blocks, choose_units(blocks, coarse), calls)
    ratios = divergence_ratios(blocks, coarse, measured)
    for unit, both in errors.items():
        ratio = ratios.get(block_of(unit[0], blocks), 0.0)
        for probe, found in zip(both, probes, strict=True):
            divergence = probe.relative * ratio * tokens
            found |= dict.fromkeys(unit, Probe(divergence, tokens, probe.error))
    return probes


def _measure(
    model: nn.Module, blocks: Sequence[str], units: Sequence[Unit], calls: Sequence[Any]
) -> tuple[dict[Unit, float], int]:
    """Return the divergence in nats per token for each unit that is rounded alone; the tokens."""
    measured: dict[Unit, float] = {}
    expected = _Expected()
    with expected.store, _BlockOutputs(model, blocks) as outputs:
        head = OutputHead(model) if outputs.prove(calls[0]) else None
        for call in calls:
            with outputs.recording(), expected.keeping() as keep:
                predict_parts(model, call, head, keep)

        def run(block: str, index: int, receive: Receive) -> None:
            with outputs.beginning_at(block, index):
                predict_parts(model, calls[index], head, receive)

        start = time.monotonic()
        for number, unit in enumerate(show_progress(units, "sensitivities")):
            layers = {name: _get_layer(model, name) for name in unit}
            with resident(model, *unit):
                compute_weight_scales(layers, Config())
            with _enable_weight_quantizers(layers.values()):
                measured[unit] = expected.divergence(partial(run, block_of(unit[0], blocks)))
            if number == 0:
                _tell_time(time.monotonic() - start, units, blocks)
    return measured, expected.tokens


def _tell_time(first: float, units: Sequence[Sequence[str]], blocks: Sequence[str]) -> None:
    """Tell the time that all units will take, given that of the first one."""
    # Example: 4 blocks with 2 units each. A unit of the first block runs all 4, one of the last
    # block 1: 8 units take as long as 2 · (4 + 3 + 2 + 1) / 4 = 5 times the first one.
    begins = [len(blocks) - blocks.index(block_of(unit[0], blocks)) for unit in units]
    seconds = first * sum(begins) / begins[0]
    if seconds >= LONG:
        logger.info("The sensitivities of %d layers take about %.0f s.", len(units), seconds)


class _BlockOutputs:
    """What the blocks of a model returned for some calls, so that a call can begin at a block.

    Args:
        model: The model.
        blocks: Its blocks in the order of execution.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._model, self._blocks = model, blocks
        self._store = ActivationStore(current_limit() // 2)
        self._forms: list[dict[str, Any]] = []  # of each call: block -> output, slots for tensors
        self._entrances: set[str] = set()  # blocks that a call can begin at

    def __enter__(self) -> _BlockOutputs:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what each block returns for a call that runs while the context is open.

        Blocks that return it again, for another part of the output head, are recorded once.
        """
        forms: dict[str, Any] = {}

        def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
            if name not in forms and _is_plain(output):
                forms[name] = self._put(output)

        with ExitStack() as stack:
            for name in self._blocks:
                module = self._model.get_submodule(name)
                stack.callback(module.register_forward_hook(partial(keep, name)).remove)
            yield
        self._forms.append(forms)

    def prove(self, call: Any) -> bool:
        """Find the blocks that calls can begin at, by an excerpt of a call.

        Returns whether the model predicts each token of a sequence.

        Blocks may read more of earlier ones than what these return, such as keys and values. Then a
        call that begins there has other predictions, or none, and all blocks run instead.
        """
        excerpt = take_excerpt(call)
        with self.recording():
            logits = _logits(self._model, excerpt)
        predictions, forms = _log_probs(logits, padding_mask(excerpt)), self._forms.pop()
        is_sequence = logits.dim() == 3
        # What blocks keep is of other tokens from here on, so that nobody can read it unnoticed. A
        # call refreshes what its blocks keep: the last block is first, as the earlier ones do not.
        others = predict(self._model, take_excerpt(call, _OTHER_TOKENS))
        if torch.equal(others, predictions):
            return is_sequence
        for block in reversed(self._blocks[1:]):
            try:
                with self._skip(forms, block):
                    if torch.equal(predict(self._model, excerpt), predictions):
                        self._entrances.add(block)
            except Exception as error:  # anything that a model can raise
                logger.debug("Calls cannot begin at %s: %s", block, error)
        return is_sequence

    def beginning_at(self, block: str, index: int) -> AbstractContextManager[None]:
        """Let a recorded call begin at a block while the context is open, if it can."""
        return self._skip(self._forms[index], block if block in self._entrances else "")

    def _skip(self, forms: Mapping[str, Any], block: str) -> AbstractContextManager[None]:
        """Let blocks before ``block`` return what is recorded; none if it is ""."""
        earlier = self._blocks[: self._blocks.index(block)] if block else ()

        def forward(name: str, *args: Any, **kwargs: Any) -> Any:
            return self._get(forms[name])

        return replace_forwards(
            self._model, {n: partial(forward, n) for n in earlier if n in forms}
        )

    def _put(self, output: Any) -> Any:
        """Store the tensors of an output; return it with their numbers in their places."""
        if isinstance(output, tuple):
            return tuple(map(self._put, output))
        if output is None:
            return None
        number = len(self._store)
        self._store[number] = output
        return number

    def _get(self, form: Any) -> Any:
        """Return an output; a copy, because models may write to it in place."""
        if isinstance(form, tuple):
            return tuple(map(self._get, form))
        return None if form is None else self._store[form].clone()


def _is_plain(output: Any) -> bool:
    """Whether an output is a tensor, or a tuple of tensors and None."""
    if type(output) is tuple:
        return all(map(_is_plain, output))
    return output is None or isinstance(output, torch.Tensor)


def _get_layer(model: nn.Module, name: str) -> FakeQuantizedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, FakeQuantizedLayer)
    return layer


@contextmanager
def _enable_weight_quantizers(layers: Iterable[FakeQuantizedLayer]) -> Iterator[None]:
    """Switch on the quantizers of weights inside the context."""
    quantizers = [q for layer in layers if (q := layer.weight_quantizer) is not None]
    for quantizer in quantizers:
        quantizer.enabled = True
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enabled = False


class _Expected:
    """Predictions of the unchanged model for some calls, in parts.

    Attributes:
        store: Store for their log-probabilities.
        tokens: Number of tokens that are predicted.
    """

    def __init__(self) -> None:
        self.store, self.tokens = ActivationStore(current_limit() // 2), 0
        self._parts: list[range] = []  # of each call: places in the store

    @contextmanager
    def keeping(self) -> Iterator[Receive]:
        """Keep the predictions of a call, which the function takes, while the context is open."""
        first = len(self.store)

        def keep(log_probs: torch.Tensor) -> None:
            self.store[len(self.store)] = log_probs
            self.tokens += len(log_probs)

        yield keep
        self._parts.append(range(first, len(self.store)))

    def divergence(self, run: Callable[[int, Receive], None]) -> float:
        """Return the mean over tokens of KL(expected ‖ actual) in nats.

        Args:
            run: Takes the number of a call and a function, which gets its predictions in the same
                parts.
        """
        divergences: list[torch.Tensor] = []

        def compare(places: Iterator[int], log_probs: torch.Tensor) -> None:
            divergences.append(kl_divergence(self.store[next(places)], log_probs))

        for index, parts in enumerate(self._parts):
            run(index, partial(compare, iter(parts)))
        return float(torch.cat(divergences).mean())


def predict(model: nn.Module, call: Any) -> torch.Tensor:
    """Return the log-probabilities of a call, (tokens, classes) float32, without padding.

    Raises:
        ValueError: The model returns no logits.
    """
    return _log_probs(_logits(model, call), padding_mask(call))


def predict_parts(model: nn.Module, call: Any, head: OutputHead | None, receive: Receive) -> None:
    """Compute the log-probabilities of a call in parts, without padding.

    The output head of a language model runs on a few tokens at a time. Predictions of other models
    are one part.

    Args:
        model: The model.
        call: Data of the call.
        head: The output head of the model; None if it does not predict each token of a sequence.
        receive: Takes the log-probabilities of successive parts.

    Raises:
        ValueError: The model returns no logits.
    """
    tokens, mask = _tokens(call), padding_mask(call)
    if head is None or tokens is None:
        receive(predict(model, call))
        return

    def take(first: int, logits: torch.Tensor) -> None:
        part = None if mask is None else mask[:, first : first + logits.shape[1]]
        receive(_log_probs(logits, part))

    head.run(partial(run_batch, model, call), tokens, take)


def _tokens(call: Any) -> torch.Tensor | None:
    """Return the tokens that a call predicts, (sequences, length); None if that is not known."""
    tokens = call
    if hasattr(call, "get"):
        tokens = None if "decoder_input_ids" in call else call.get("input_ids")
    is_grid = isinstance(tokens, torch.Tensor) and tokens.dim() == 2
    return tokens if is_grid and not tokens.is_floating_point() else None


def _log_probs(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the log-probabilities of tokens that are no padding, (tokens, classes) float32."""
    rows = logits.flatten(0, -2)
    own = rows if mask is None else rows[mask.flatten().to(rows.device)]
    return own.float().log_softmax(-1)


def _logits(model: nn.Module, call: Any) -> torch.Tensor:
    """Return the logits of a call, (…, classes); ``ValueError`` if the model returns none."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        run_batch(model, call)
    finally:
        handle.remove()
    output = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} returned {type(output).__name__} without logits, which "
            "sensitivities are measured on. Pass probes=0, or a model with a head."
        )
    return logits
