"""Options of algorithms that train weights, block by block."""

from __future__ import annotations

from dataclasses import dataclass, field

from quark.torch.quantization.config.algo_base import RoundingConfig
from quark.torch.quantization.config.bounds import (
    Count,
    Divisor,
    Natural,
    NonNegative,
    Positive,
)


@dataclass
class AutoRoundConfig(RoundingConfig):
    """Options of AutoRound (Cheng et al. 2024): rounding trained by signed gradient descent.

    Attributes:
        iters: Training steps per decoder block.
        lr: Learning rate of the rounding offsets.
        enable_minmax_tuning: Whether to train the ranges of weights too.
        minmax_lr: Learning rate of the ranges.
        batch_size: Sequences per step.
        inside_layer_modules: Names of the layers of a block to round. Empty: all quantized layers.
        model_decoder_layers: Name of the list of decoder blocks. Empty: discovered.
    """

    name: str = "autoround"
    iters: Natural = 200
    lr: NonNegative = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: NonNegative = 1 / 200
    batch_size: Count = 8
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""


@dataclass
class BlockwiseJointTuningConfig(RoundingConfig):
    """Options of joint tuning (Chen et al. 2024, EfficientQAT): weights and ranges train together.

    Attributes:
        epochs: Passes over the data per decoder block.
        weight_lr: Learning rate of weights; 0 leaves them.
        qparam_lr: Learning rate of scales and zero points, in the unit of weights; 0 leaves them.
        weight_decay: Weight decay of weights.
        qparam_weight_decay: Weight decay of scales and zero points.
        min_lr_factor: Learning rates fall to their start divided by this.
        max_grad_norm: Largest norm of a gradient; a larger one is shortened to it.
        batch_size: Sequences per step.
        inside_layer_modules: Names of the layers of a block to round. Empty: all quantized layers.
        model_decoder_layers: Name of the list of decoder blocks. Empty: discovered.
        trainable_modules: Parts of names of the layers whose weights train. Empty: all.
        quant_trainable_modules: Parts of names of the layers whose ranges train. Empty: all.
    """

    name: str = "blockwise_joint_tuning"
    epochs: Count = 5
    weight_lr: NonNegative = 1e-4
    qparam_lr: NonNegative = 1e-4
    weight_decay: NonNegative = 0.0
    qparam_weight_decay: NonNegative = 0.0
    min_lr_factor: Divisor = 20.0
    max_grad_norm: Positive = 0.3
    batch_size: Count = 2
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""
    trainable_modules: list[str] = field(default_factory=list)
    quant_trainable_modules: list[str] = field(default_factory=list)
