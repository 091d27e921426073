"""AWQ (Lin et al. 2024): weights that meet large activations are scaled up before rounding.

The errors of the paper's search are those of outputs over all calibration tokens. They depend on
the tokens through sums of x xᵀ alone, so data runs once, and every candidate is judged exactly.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from quark.torch.algorithm.clipping import clipped, group_width
from quark.torch.algorithm.rescaling import (
    along,
    as_rows,
    block_layers,
    check_served,
    consumer_edits,
    observe_grams,
    to_channels,
    to_factors,
    usable_groups,
)
from quark.torch.graph.structure import Edit, ScaleGroup
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config.algo import AWQConfig, RoundingConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import QuantMixin

logger = logging.getLogger(__name__)

EXPONENTS = 20  # strengths of the search: r = 0, 1/20, … 19/20
# Share of the loss that rescaling has to win where an algorithm that rounds follows, which makes up
# for the rest itself: 0 to 10 % is won without outliers, 14 to 68 % with them (at 3 and 4 bits).
LEAST_GAIN = 0.125


def check(options: AWQConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_served(layers, "awq", has_quantized_weight)


def resolve(context: Context, options: AWQConfig) -> Collection[str]:
    """Raise if nothing can be rescaled.

    Raises:
        ValueError: As of ``apply``.
    """
    _groups(context, options)
    return ()


def apply(context: Context, options: AWQConfig) -> None:
    """Rescale and clip weights block by block so that their rounding moves outputs least.

    Raises:
        ValueError: No input of a quantized weight can be rescaled, or what ``scaling_layers``
            names cannot.
    """
    groups = _groups(context, options)
    by_block: dict[str, list[ScaleGroup]] = defaultdict(list)
    for group in groups:
        by_block[group.block].append(group)
    if by_block.pop("", None):
        logger.info("awq leaves what lies outside of decoder blocks as it is.")
    names = context.structure.blocks
    # What rounds weights with care afterwards chooses ranges itself, and needs all of the weight.
    rounds = any(isinstance(a, RoundingConfig) for a in context.config.algo_config or [])
    for block in run_blocks(context.model, names, context.batches, "awq"):
        layers = block_layers(context, block.name, has_quantized_weight)
        grams = observe_grams(context, block, layers)
        for group in by_block[block.name]:
            _rescale(group, context, grams, LEAST_GAIN if rounds else 0.0)
        for name, layer in layers.items() if not rounds else ():
            gram = grams[name]
            if gram.total is not None:
                clip_(layer, gram.total)


def has_quantized_weight(config: QuantizationConfig) -> bool:
    """Whether a layer rounds its weight to a format with scales."""
    return config.weight is not None and config.weight.fmt.scaled


def output_error(change: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared changes of outputs over all tokens, [].

    Args:
        change: Change of the weight, (outputs, inputs).
        gram: Sum of x xᵀ, (inputs, inputs).
    """
    return (change @ gram).mul_(change).sum()


def strengths(magnitude: torch.Tensor, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Iterate over factors to try, (size,) each: section 3.2 of the paper, and a variant.

    Args:
        magnitude: Mean |x| of each channel, (size,). Where it is zero, the factor is 1.
        weight: Mean |w| relative to the largest of its group, (size,). The variant divides by
            its complement power, as SmoothQuant does.
    """
    used = magnitude > 0
    for step in range(EXPONENTS) if bool(used.any()) else ():
        r = step / EXPONENTS
        scaled = magnitude[used] ** r
        for factors in (scaled, scaled / weight[used].clamp(min=1e-4) ** (1 - r)):
            found = torch.ones_like(magnitude)
            found[used] = (factors / (factors.max() * factors.min()).sqrt()).clamp(1e-4, 1e4)
            yield found


def _rescale(
    group: ScaleGroup, context: Context, grams: dict[str, Gram], least_gain: float
) -> None:
    """Apply the factors under which the outputs of all consumers change least.

    Args:
        group: What is rescaled together.
        context: The model.
        grams: Statistics of the inputs of layers.
        least_gain: Share of the loss that has to be won.
    """
    edits = [(n, layer, edit) for n, layer, edit in consumer_edits(group, context) if n in grams]
    edits = [e for e in edits if grams[e[0]].total is not None]
    if not edits:
        return
    tokens = sum(grams[n].tokens for n, _, _ in edits)
    magnitude = torch.zeros(group.size, device=edits[0][1].weight.device)
    for name, _, edit in edits:
        total = grams[name].magnitude
        assert total is not None
        mean = to_factors(total / grams[name].tokens, edit, group.size, "mean")
        magnitude += mean * (grams[name].tokens / tokens)
    weight = torch.stack([_relative(layer, edit, group.size) for _, layer, edit in edits]).mean(0)
    wholes = [_whole(layer, edit, grams[name]) for name, layer, edit in edits]
    best = _best(
        [torch.ones_like(magnitude), *strengths(magnitude, weight)],
        lambda factors: _loss(factors, edits, wholes, grams),
        least_gain,
    )
    group.apply_(context.model, best)
    for gram, edit in {id(grams[n]): (grams[n], e) for n, _, e in edits}.values():
        gram.rescale_(to_channels(best, edit))


def _best(
    candidates: list[torch.Tensor], loss: Callable[[torch.Tensor], float], least_gain: float
) -> torch.Tensor:
    """Return the best of no change and of what ``strengths`` gives, looking at some first.

    Every fourth strength of both kinds is tried, then those beside the best. Without a gain of the
    share ``least_gain`` it is no change.
    """
    losses = {0: loss(candidates[0])}
    first = [i for i in range(1, len(candidates)) if (i - 1) // 2 % 4 == 0]
    losses |= {i: loss(candidates[i]) for i in first}
    near = min(first, key=lambda i: losses[i], default=0)
    for i in (near - 4, near - 2, near + 2, near + 4) if near else ():
        if 0 < i < len(candidates) and i not in losses:
            losses[i] = loss(candidates[i])
    best = min(losses, key=lambda i: losses[i])
    return candidates[best if losses[best] <= (1 - least_gain) * losses[0] else 0]


def _whole(layer: QuantMixin, edit: Edit, gram: Gram) -> float:
    """Return the sum of squared outputs, which errors are relative to."""
    assert gram.total is not None
    return float(output_error(as_rows(layer.weight.detach().float(), edit.axis), gram.total))


def _loss(
    factors: torch.Tensor,
    edits: list[tuple[str, QuantMixin, Edit]],
    wholes: list[float],
    grams: dict[str, Gram],
) -> float:
    loss = 0.0
    for (name, layer, edit), whole in zip(edits, wholes, strict=True):
        weight = layer.weight.detach().float()
        by = along(to_channels(factors, edit), weight, edit.axis)
        assert layer.weight_quantizer is not None
        change = layer.weight_quantizer.rounded(weight * by).div_(by).sub_(weight)
        gram = grams[name].total
        assert gram is not None
        loss += float(output_error(as_rows(change, edit.axis), gram)) / max(whole, 1e-30)
    return loss


def _relative(layer: QuantMixin, edit: Edit, size: int) -> torch.Tensor:
    """Return mean |w| of the columns of each factor, relative to the range they are rounded by."""
    rows = as_rows(layer.weight.detach(), edit.axis).float().abs()
    assert layer.weight_quantizer is not None
    width = group_width(layer.weight_quantizer.scheme, rows.shape[1])
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width))
    blocks = padded.view(len(rows), -1, width)
    relative = blocks / blocks.amax(-1, keepdim=True).clamp(min=1e-12)
    mean = relative.flatten(1)[:, : rows.shape[1]].mean(0)
    return to_factors(mean, edit, size, "mean")


@torch.no_grad()
def clip_(layer: QuantMixin, gram: torch.Tensor) -> None:
    """Cut off the largest weights of each group where outputs change less for it.

    Section 3.2 of the paper.

    Args:
        layer: A layer with a quantized weight.
        gram: Sum of x xᵀ over its inputs, (inputs, inputs).
    """
    found = clipped(layer, gram)
    if found is not None:
        layer.weight.data.copy_(found)


def _groups(context: Context, options: AWQConfig) -> list[ScaleGroup]:
    return usable_groups(
        context, "awq", has_quantized_weight, options.scaling_layers, options.model_decoder_layers
    )


ALGORITHM = Algorithm(check, apply, resolve=resolve)
