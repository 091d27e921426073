"""Qronos (Zhang et al. 2025) and GPTAQ (Li et al. 2025): GPTQ with corrected weights.

Weights first compensate for the errors that earlier layers caused in their inputs
(``input_correction``). GPTAQ scales that correction by ``alpha``.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.torch.algorithm.input_correction import (
    DAMPING,
    correct_and_round,
    correction_work,
)
from quark.torch.algorithm.layers import check_weights_quantized
from quark.torch.algorithm.weight_rounding import iterate_blocks, resolve
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.quantization.config.algo import GPTAQConfig, QronosConfig
from quark.torch.quantization.config.layer import QuantizationConfig


def check(options: GPTAQConfig | QronosConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)


def apply(context: Context, options: GPTAQConfig | QronosConfig) -> None:
    """Correct and round weights layer by layer, each on the outputs of those rounded before.

    Experts are rounded without a correction.
    """
    strength = options.alpha if isinstance(options, GPTAQConfig) else 1.0
    damping = options.damp_percent if isinstance(options, GPTAQConfig) else DAMPING
    for block, layers in iterate_blocks(context, options, compare=True):
        correct_and_round(
            context,
            block,
            layers,
            strength,
            damping,
            options.desc_act,
            hold_out=options.choose_damping,
        )


ALGORITHM = Algorithm(
    check,
    apply,
    resolve=resolve,
    work=correction_work,
)
