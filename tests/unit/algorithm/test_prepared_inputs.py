"""Quantized layers with factors, rotations and branches, against the same in plain torch."""

import pytest
import torch

from quark.torch.quantization.config.algo import (
    OnlineRotationConfig,
    RotationConfig,
    SVDQuantConfig,
)
from tests.configurations import quantized_by
from tests.models.architectures import tokens, varied

BATCHES = [tokens(40), tokens(60)]
LAYER = "model.layers.1.mlp.gate_proj"
SIZE = 32
BRANCH = SVDQuantConfig(svd_rank=4, min_layer_size=0)


def rotation(prescale):
    online = OnlineRotationConfig(online_rotation_layers=["*"], use_input_prescale=prescale)
    return RotationConfig(r1=False, rotation_size=SIZE, online_config=online)


def rounded(x):
    """Each row to fp8, as its type in torch rounds."""
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def rotated(x):
    """Each 32 values times Sylvester's matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (x.unflatten(-1, (-1, SIZE)) @ (matrix / SIZE**0.5)).flatten(-2)


@torch.no_grad()
@pytest.mark.parametrize(
    "given",
    [[rotation(False)], [rotation(True)], [BRANCH], [rotation(True), BRANCH]],
    ids=["rotation", "factors and rotation", "branch", "all"],
)
def test_the_output_of_a_layer(given):
    weight = varied("llama").get_submodule(LAYER).weight
    model = quantized_by(varied("llama"), "ptpc_fp8", *given, data=BATCHES)
    layer, seen = model.get_submodule(LAYER), []
    layer.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    model(tokens(20))
    [(x, found)] = seen
    plain = x @ weight.T
    if layer.input_prescale is not None:
        x, weight = x * layer.input_prescale, weight / layer.input_prescale
    if isinstance(given[0], RotationConfig):
        x, weight = rotated(x), rotated(weight)
    expected = 0
    if BRANCH in given:
        expected = x @ layer.low_rank_down.T @ layer.low_rank_up.T
        weight = weight - layer.low_rank_up @ layer.low_rank_down
    expected = expected + rounded(x) @ rounded(weight).T
    lost = (expected - plain).norm()
    assert lost > 0.005 * plain.norm()
    assert (found - expected).norm() < 0.01 * lost  # a value beside a tie is rounded otherwise
