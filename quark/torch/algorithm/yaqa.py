"""YAQA (Tseng et al. 2025): weights are rounded for the sake of the predictions of the model.

What errors D of a weight do to the predictions is tr(O D H Dᵀ) to second order, with H the mean of
x xᵀ over inputs and O that of g gᵀ over gradients of the log-likelihood by outputs, labels drawn
from the predictions themselves (sketch A of the paper). GPTQ takes all outputs for equal: O = 1.
Here errors go on to later rows as well as to later columns, and a token counts in H by the
magnitude of the gradient behind its block. Weights first make up for what earlier
layers did to their inputs, as in Qronos; the best weight to round is the same for every O.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.algorithm.awq import has_quantized_weight
from quark.torch.algorithm.gptq import (
    Solver,
    inverse_factor,
    resolve,
    solve,
    solved_blocks,
    solved_layers,
)
from quark.torch.algorithm.qronos import round_block
from quark.torch.algorithm.rescaling import check_served
from quark.torch.numerics.qdq import ColumnRounding
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.backward import run_blocks_back
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.quantization.config.algo import YaqaConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import counterparts

logger = logging.getLogger(__name__)

PIECES = 16  # rows are rounded in so many pieces; those of one do not see each other's errors


def check(options: YaqaConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No weight is quantized, or an option is not between 0 and 1.
    """
    for name in ("damp_percent", "output_damp_percent"):
        given = getattr(options, name)
        if not 0 <= given <= 1:
            raise ValueError(f"yaqa: {name} is a share from 0 to 1, got {given}.")
    check_served(layers, options.name, has_quantized_weight)


def apply(context: Context, options: YaqaConfig) -> None:
    """Correct and round weights layer by layer, each on what came of those before.

    Experts are rounded as by GPTQ.
    """
    with ActivationStore() as store:
        found = observe_gradients(context, options, store)

        def solver_of(name: str) -> Solver:
            outputs = found.outputs(name)
            if outputs is None:
                return solve
            return partial(solve_both, outputs=outputs, damping=options.output_damp_percent)

        for block, layers in solved_blocks(context, options, compare=True):
            round_block(
                context,
                block,
                layers,
                damping=options.damp_percent,
                by_size=options.desc_act,
                solver_of=solver_of,
                weights=partial(found.tokens, block.name),
            )


def solve_both(
    weight: torch.Tensor,
    upper: torch.Tensor,
    order: torch.Tensor,
    rounding: ColumnRounding,
    outputs: torch.Tensor,
    damping: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight so that later columns and later rows make up for what was lost.

    The rows whose errors matter most come first. After each piece of them the best values of the
    others are what they were less O₂₂⁻¹ O₂₁ times what the piece gained: H has no part in it.

    Args:
        weight: See ``solve``, as ``upper``, ``order`` and ``rounding``.
        upper: See there.
        order: See there.
        rounding: See there.
        outputs: (outputs, outputs): sum O of g gᵀ.
        damping: Share of the mean of its diagonal that is added to all.

    Returns:
        The rounded weight, and the errors: the sum of their squares is tr(O D H Dᵀ), both damped,
        but for what rows of one piece have to do with each other if there are several.
    """
    rows = torch.argsort(outputs.diagonal(), descending=True, stable=True)
    factor = inverse_factor(outputs[rows][:, rows], damping)
    if factor is None:
        return solve(weight, upper, order, rounding)
    rest = weight[rows]
    done, errors = torch.empty_like(weight), torch.empty_like(weight)
    step = -(-len(rows) // PIECES)
    for start in range(0, len(rows), step):
        end = start + step
        piece = rows[start:end]
        rounded, lost = solve(rest[start:end], upper, order, rounding.of_rows(piece))
        own = factor[start:end, start:end].T
        share = torch.linalg.solve_triangular(own, rest[start:end] - rounded, upper=False)
        rest[end:].addmm_(factor[start:end, end:].T, share, alpha=-1)
        done[piece] = rounded
        errors[piece] = torch.linalg.solve_triangular(own, lost, upper=False)
    return done, errors


class Gradients:
    """What gradients of the log-likelihood tell of layers and of tokens, in a store."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._places: dict[str | tuple[str, int], int] = {}

    def keep(self, what: str | tuple[str, int], x: torch.Tensor) -> None:
        """Put a tensor of a layer, or of a block and a batch, into the store."""
        self._places[what] = len(self._places)
        self._store[self._places[what]] = x

    def outputs(self, layer: str) -> torch.Tensor | None:
        """Return the sum of g gᵀ over tokens for the outputs of a layer, (outputs, outputs).

        Experts have none: too few tokens reach one.
        """
        return self._read(layer)

    def tokens(self, block: str, index: int) -> torch.Tensor | None:
        """Return |g| by what a block returns, for each token of a batch that is not padding."""
        return self._read((block, index))

    def _read(self, what: str | tuple[str, int]) -> torch.Tensor | None:
        return self._store[self._places[what]] if what in self._places else None


def observe_gradients(context: Context, options: YaqaConfig, store: ActivationStore) -> Gradients:
    """Take the data through the model and back.

    Args:
        context: The model.
        options: They say which layers.
        store: Takes in what is found.
    """
    routed = {name for names in counterparts(context.model) for name in names}
    found = Gradients(store)
    names = context.structure.blocks
    for block, back in run_blocks_back(context.model, names, context.batches, "yaqa", Surprise()):
        layers = solved_layers(context, block.name, options)
        seen = {name: _Outputs(m) for name, m in layers.items() if name not in routed}
        try:
            for index in range(len(block)):
                behind = back(index).float().norm(dim=-1).flatten()
                mask = block.masks(index)
                behind = behind if mask is None else behind[mask.flatten().to(behind.device)]
                if bool(behind.any()) and bool(behind.isfinite().all()):
                    found.keep((block.name, index), behind)
        finally:
            for gradients in seen.values():
                gradients.remove()
        for name, gradients in seen.items():
            if gradients.total is None or not bool(gradients.total.isfinite().all()):
                logger.warning("yaqa: no finite gradients by %s: it is rounded as by GPTQ.", name)
                continue
            found.keep(name, gradients.total)
    return found


class _Outputs:
    """Takes in the gradients by the outputs of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.total: torch.Tensor | None = None
        self.remove = layer.register_forward_hook(self._watch).remove

    def _watch(self, layer: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        if y.requires_grad:
            y.register_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, gradient: torch.Tensor) -> None:
        g = gradient.flatten(0, -2).float()
        if self.total is None:
            self.total = g.new_zeros(g.shape[1], g.shape[1])
        self.total.addmm_(g.T, g)


class Surprise:
    """The negative log-likelihood of labels drawn from the predictions, summed over tokens.

    Each sequence has draws of its own, the same in whatever batch it comes.
    """

    def __init__(self) -> None:
        self._sequences = 0

    def __call__(self, logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the loss of a batch.

        Args:
            logits: (sequences, ..., labels).
            mask: Tokens that count, (sequences, tokens) bool; None for all.
        """
        tokens = logits.flatten(1, -2) if logits.dim() > 2 else logits.unsqueeze(1)
        first, self._sequences = self._sequences, self._sequences + len(tokens)
        draws = torch.stack([_draws(first + i, tokens.shape[1]) for i in range(len(tokens))])
        rows, draws = tokens.flatten(0, 1).float(), draws.flatten().to(logits.device)
        with torch.no_grad():
            sums = rows.softmax(-1).cumsum(-1)
            labels = torch.searchsorted(sums, draws.unsqueeze(1)).clamp_(max=rows.shape[1] - 1)
        if mask is not None:
            kept = mask.flatten().to(rows.device)
            rows, labels = rows[kept], labels[kept]
        return F.cross_entropy(rows, labels.flatten(), reduction="sum")


def _draws(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


ALGORITHM = Algorithm(check, apply, resolve=resolve)
