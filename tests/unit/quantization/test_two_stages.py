"""Weights in two stages over integers."""

import copy

import torch
from torch import nn

from tests.configurations import config, quantized, spec

INT8 = spec("int8", symmetric=True)
INT4 = spec("int4", "per_channel", symmetric=True)


def test_a_second_stage_over_integers():
    """Codes of int8 are rounded to int4 in rows: the error is nearly that of int4 alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    weight = model[0].weight.detach().clone()
    two, one = (
        quantized(copy.deepcopy(model), config(way, exclude=()))[0].weight
        for way in ([INT8, INT4], INT4)
    )
    first, second = (float((rounded - weight).norm()) for rounded in (one, two))
    assert 0 < second < 1.1 * first
    quantizer = quantized(model, config([INT8, INT4], exclude=()), frozen=False)[0].weight_quantizer
    codes = two / (quantizer.scale * quantizer.scale_2.unsqueeze(1))
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert codes.abs().max() <= 8
