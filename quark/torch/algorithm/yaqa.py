"""YAQA (Tseng et al. 2025): rounds weights so that the predictions of the model change least.

A change D of a weight changes the log-likelihood of the predictions by tr(O D H Dᵀ) to second
order. H is the mean of x xᵀ over inputs; O is that of g gᵀ over gradients of the log-likelihood
with respect to outputs, in expectation over labels drawn from the predictions themselves (sketch A
of the paper; random signs estimate it here, see ``fisher_loss``). GPTQ is the case O = I. Here
other rows compensate for errors as well as later columns (``kronecker_solver``), and a token is
weighted in H by the norm of the gradient after its decoder block. Weights first compensate for the
errors of earlier layers (``input_correction``); the corrected weight does not depend on O.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from quark.torch.algorithm.gptq_solver import Solver, solve_columns
from quark.torch.algorithm.input_correction import correct_and_round, correction_work
from quark.torch.algorithm.kronecker_solver import MULTIPLES, SWEEPS, round_rows_and_columns
from quark.torch.algorithm.layers import check_weights_quantized
from quark.torch.algorithm.weight_rounding import (
    iterate_blocks,
    needed_units,
    select_block_layers,
)
from quark.torch.algorithm.weight_rounding import resolve as select_layers
from quark.torch.pipeline.accumulators import Sum
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.backward import check_logits, run_blocks_backward
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.reducer import Reducer
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import YaqaConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

REFITS = 1  # of scales to rounded values, before rows and columns are rounded


def check(options: YaqaConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def resolve(context: Context, options: YaqaConfig) -> Collection[str]:
    """Raise if the options select no layer, or there are no gradients; no input is rotated.

    Raises:
        ValueError: As in ``iterate_blocks``, or the model returns no logits.
    """
    check_logits(context.model, context.batches)
    return select_layers(context, options)


def apply(context: Context, options: YaqaConfig) -> None:
    """Correct and round weights layer by layer, each on the outputs of those rounded before.

    Experts and convolutions of several groups are rounded as by GPTQ.
    """
    with ActivationStore() as store:
        gradients = collect_gradients(context, options, store)

        def solver_of(name: str) -> Solver:
            output_hessian = gradients.output_hessian(name)
            if output_hessian is None or context.layers[name].channel_groups > 1:
                return solve_columns
            damping = options.output_damp_percent
            return partial(
                round_rows_and_columns, output_hessian=output_hessian, output_damping=damping
            )

        for block, layers in iterate_blocks(context, options, compare=True):
            correct_and_round(
                context,
                block,
                layers,
                damping=options.damp_percent,
                by_magnitude=options.desc_act,
                solver_of=solver_of,
                token_weights=partial(gradients.token_norms, block.name),
                hold_out=options.choose_damping,
                refits=REFITS,
            )


class GradientStatistics:
    """Statistics of the gradients of the log-likelihood, by layer and by token.

    Args:
        store: Holds the tensors.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._indices: dict[str | tuple[str, int], int] = {}

    def add(self, key: str | tuple[str, int], x: torch.Tensor) -> None:
        """Store a tensor of a layer (its name), or of a block and a batch (name and index)."""
        self._indices[key] = len(self._indices)
        self._store[self._indices[key]] = x

    def output_hessian(self, layer: str) -> torch.Tensor | None:
        """Return the sum of g gᵀ over tokens for the outputs of a layer, (outputs, outputs).

        None for experts, which receive too few tokens, and for layers without finite gradients or
        on which no logits depend.
        """
        return self._read(layer)

    def token_norms(self, block: str, index: int) -> torch.Tensor | None:
        """Return |g| with respect to the outputs of a block, (tokens,) without padding, or None."""
        return self._read((block, index))

    def _read(self, key: str | tuple[str, int]) -> torch.Tensor | None:
        return self._store[self._indices[key]] if key in self._indices else None


def collect_gradients(
    context: Context, options: YaqaConfig, store: ActivationStore
) -> GradientStatistics:
    """Run the data forward and backward through the model.

    Args:
        context: The model.
        options: Options of the algorithm, which select layers.
        store: Holds the statistics.
    """
    routed = {name for names in corresponding_experts(context.model) for name in names}
    statistics = GradientStatistics(store)
    backward = run_blocks_backward(
        context.model, needed_units(context, options), context.batches, "yaqa", fisher_loss
    )
    for block, back in backward:
        layers = select_block_layers(context, block.name, options)
        reducer = Reducer([n for n in layers if n not in routed], lambda leaf: Sum())
        handles = [_watch_gradients(layers[n], n, reducer) for n in layers if n not in routed]
        try:
            for index in (index for indices in block.reduce(reducer) for index in indices):
                gradient = back(index)
                if gradient.dim() == 4 and gradient.shape[1] == gradient.shape[3]:
                    continue  # channels may be either axis
                norms = gradient.float().norm(dim=-1).flatten()
                mask = block.masks(index)
                norms = norms if mask is None else norms[mask.flatten().to(norms.device)]
                if bool(norms.any()) and bool(norms.isfinite().all()):
                    statistics.add((block.name, index), norms)
        finally:
            for handle in handles:
                handle.remove()
        for name, total in reducer.totals.items():
            if total.total is None or not bool(total.total.isfinite().all() & total.total.any()):
                logger.warning(
                    "yaqa: no logits depend on %s by finite gradients: it is rounded by GPTQ.", name
                )
                continue
            statistics.add(name, total.total)
    return statistics


def _watch_gradients(
    layer: FakeQuantizedLayer, name: str, reducer: Reducer[Sum]
) -> RemovableHandle:
    """Add g gᵀ over the gradients g with respect to the outputs of a layer to its part."""

    def add(gradient: torch.Tensor) -> None:
        axis = _channel_axis(layer)
        g = gradient.movedim(axis, -1).flatten(0, -2).float()
        reducer.parts[name].add_product(g, g)

    def watch(layer: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> None:
        if y.requires_grad:
            y.register_hook(add)  # type: ignore[no-untyped-call]

    return layer.register_forward_hook(watch)


def _channel_axis(layer: FakeQuantizedLayer) -> int:
    """Return the axis of the channels in the outputs of a layer, counted from the end."""
    return 1 - layer.weight.dim() if layer.is_convolution else -1


def fisher_loss(logits: torch.Tensor, mask: torch.Tensor | None, first: int = 0) -> torch.Tensor:
    """Return a loss whose random gradients have the Fisher information as their second moment.

    It is the sum of v · logits over tokens, with v = √p z - p (√p · z) for predictions p and random
    signs z. The mean of v is zero and its covariance diag(p) - p pᵀ, as that of the gradient for a
    label drawn from p, which is almost always tiny where the model is sure, and rarely huge.

    Each sequence has its own random numbers, whatever the batch that it is part of.

    Args:
        logits: (sequences, ..., labels); of segmented images, (images, labels, rows, columns).
        mask: Tokens that count, (sequences, tokens) bool; None for all.
        first: Number of the first sequence in the data.
    """
    logits = logits.movedim(1, -1) if logits.dim() == 4 else logits
    tokens = logits.flatten(1, -2) if logits.dim() > 2 else logits.unsqueeze(1)
    changes = torch.empty_like(tokens, requires_grad=False)
    with torch.no_grad():
        for number, (own, change) in enumerate(zip(tokens, changes, strict=True), first):
            root = own.float().softmax(-1).sqrt_()
            signed = _draw_signs(number, root.shape).to(root).mul_(root)
            change.copy_(signed.addcmul_(root.square_(), signed.sum(-1, keepdim=True), value=-1))
        if mask is not None:
            changes *= mask.reshape(tokens.shape[:2]).unsqueeze(-1).to(changes.device)
    return (tokens.flatten() @ changes.flatten()).float()


def _draw_signs(seed: int, shape: torch.Size) -> torch.Tensor:
    """Return random numbers of -1 and 1, int8."""
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 2, shape, generator=random, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
    )


def work(options: YaqaConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: that of the correction, and a pass forward and one backward.

    The backward pass holds the graph of the block, the hidden states of all blocks, a sum of g gᵀ
    for each layer; and, after the blocks, logits and three tensors of their size in float32:
    what they are multiplied by, the roots of the predictions, and signs times these.
    """
    own = correction_work(options, block, data, REFITS)
    rows = [layer.outputs for layer in block.layers if layer.share == 1]
    sums = sum(FLOAT32 * n * n for n in rows)
    factor = FLOAT32 * 6 * max(rows, default=0) ** 2
    descent = block.largest(lambda x: FLOAT32 * 2 * x.inputs**2)
    tries = len(MULTIPLES) + SWEEPS
    graph = FLOAT32 * data.batch * (16 * data.hidden + 4 * sum(x.outputs for x in block.layers))
    loss = (data.itemsize + 3 * FLOAT32) * data.batch * data.labels
    memory = max(own.memory, sums + max(graph, loss))
    return own._replace(
        memory=memory,
        solving=max(own.memory + own.solving + factor + descent - memory, 0),
        passes=own.passes + 4,
        # Rounding changes later columns; descent and a fit of scales multiply by H once each, and
        # change later columns or groups. The last rounding of ``own`` is one of the multiples.
        flops=own.flops
        + sum((8.0 * tries - 2) * x.outputs * x.inputs**2 for x in block.layers if x.share == 1)
        + sum(2.0 * data.tokens * n * n + 2.0 * n**3 for n in rows),
        stores=max(own.stores, data.blocks + 3),
        reads=4 + own.reads,  # the loss is tried, stacks are found, all runs forward and backward
        held=sums,
    )


ALGORITHM = Algorithm(check, apply, resolve=resolve, work=work)
