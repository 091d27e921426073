"""Runs of a model for the first tokens of data, beside what it returned for them unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.evaluation.output_head import OutputHead
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import padding_mask, run_batch
from quark.torch.pipeline.stacks import StopForward
from quark.torch.quantization.nn.padding import padding, without_padding
from quark.torch.statistics.block_outputs import BlockOutputs
from quark.torch.statistics.log_probabilities import predict_parts


class Pieces(NamedTuple):
    """The first tokens of the data, in calls.

    Attributes:
        predicted: Calls whose predictions are measured.
        seen: Calls that run through single blocks.
    """

    predicted: list[Any]
    seen: list[Any]


class ProbeRuns:
    """Runs of a model for some calls, beside what it returned for them unchanged.

    Args:
        model: The model.
        blocks: Its blocks in the order of execution.
        pieces: Data of the calls.

    Attributes:
        tokens: Number of tokens that are predicted.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], pieces: Pieces) -> None:
        self._model, self._calls = model, [*pieces.predicted, *pieces.seen]
        self._predicted = range(len(pieces.predicted))
        self._seen = range(len(pieces.predicted), len(self._calls))
        self._outputs = BlockOutputs(model, blocks)
        self._expected = ActivationStore(current_limit() // 2)
        self._parts: list[range] = []  # of each call: places of its log-probabilities
        self._head: OutputHead | None = None
        self.tokens = 0

    def __enter__(self) -> ProbeRuns:
        is_sequence = self._outputs.prove(self._calls[0])
        self._head = OutputHead(self._model) if is_sequence else None
        for index in self._predicted:
            first = len(self._expected)
            with self._outputs.recording():
                predict_parts(self._model, self._calls[index], self._head, self._keep)
            self._parts.append(range(first, len(self._expected)))
        for index in self._seen:
            with self._outputs.recording():
                run_batch(self._model, self._calls[index])
        return self

    def _keep(self, log_probs: torch.Tensor) -> None:
        self._expected[len(self._expected)] = log_probs
        self.tokens += len(log_probs)

    def __exit__(self, *error: object) -> None:
        self._outputs.clear()
        self._expected.clear()

    def divergences(self, block: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KL(unchanged ‖ model) of predicted tokens in nats, and errors of a block there.

        Runs begin at the block. Both are (tokens,) float64. Errors are as in ``block_errors``.
        """
        found: list[torch.Tensor] = []
        errors: list[torch.Tensor | None] = []

        def compare(places: Iterator[int], log_probs: torch.Tensor) -> None:
            found.append(kl_divergence(self._expected[next(places)], log_probs))

        for index, parts in zip(self._predicted, self._parts, strict=True):
            with self._outputs.beginning_at(block, index), self._watching(block) as outputs:
                receive = partial(compare, iter(parts))
                predict_parts(self._model, self._calls[index], self._head, receive)
            errors.append(self._compare_outputs(block, index, outputs))
        return torch.cat(found), _join(errors)

    def block_errors(self, block: str) -> torch.Tensor:
        """Return the relative squared errors of what a block returns for the tokens that it sees.

        They are (tokens,) float64, a single 0 if they are not known.
        """
        errors: list[torch.Tensor | None] = []
        for index in self._seen if block else ():
            with (
                self._outputs.beginning_at(block, index),
                self._watching(block, stops=True) as outputs,
                suppress(StopForward),
            ):
                run_batch(self._model, self._calls[index])
            errors.append(self._compare_outputs(block, index, outputs))
        return _join(errors)

    @contextmanager
    def _watching(self, block: str, stops: bool = False) -> Iterator[list[Any]]:
        """Collect what a block returns inside the context; then stop the run if asked to."""
        outputs: list[Any] = []

        def take(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            if stops:
                raise StopForward

        hook = self._model.get_submodule(block).register_forward_hook(take) if block else None
        try:
            yield outputs
        finally:
            if hook is not None:
                hook.remove()

    def _compare_outputs(
        self, block: str, index: int, outputs: Sequence[Any]
    ) -> torch.Tensor | None:
        """Return the relative squared errors of the first output of a block; None without one."""
        before = _hidden_states(self._outputs.recorded(block, index))
        after = _hidden_states(outputs[0] if outputs else None)
        if before is None or after is None or before.shape != after.shape:
            return None
        with padding(padding_mask(self._calls[index])):
            y, other = (without_padding(x).double() for x in (before, after))
        size = y.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
        return ((other - y).square().sum(-1) / size).flatten().cpu()


def _join(errors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return errors of all calls, a single 0 if some are not known."""
    known = [error for error in errors if error is not None]
    is_complete = known and len(known) == len(errors)
    return torch.cat(known) if is_complete else torch.zeros(1, dtype=torch.float64, device="cpu")


def _hidden_states(output: Any) -> torch.Tensor | None:
    """Return the first tensor of what a block returns, None without one."""
    x = output[0] if isinstance(output, tuple) and output else output
    return x if isinstance(x, torch.Tensor) and x.is_floating_point() else None
