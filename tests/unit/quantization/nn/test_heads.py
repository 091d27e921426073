"""Keys and values that have a scale per head."""

from dataclasses import replace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.configurations import quantized
from tests.unit.quantization.nn.caches import HEAD, IDS, config_of, logits_of

_HALF = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# Number format -> largest value under the scale 1, and all values.
GRIDS = {
    "int8": (127.5, torch.arange(-128.0, 128.0)),
    "int4": (7.5, torch.arange(-8.0, 8.0)),
    "fp8_e4m3": (448, _FP8[_FP8.isfinite()].unique()),
    "fp4": (6, torch.cat([-_HALF, _HALF]).unique()),
}


def nearest(x, grid):
    """Round to the nearest value of a grid; none of the values here lies halfway."""
    return grid[(x.unsqueeze(-1) - grid).abs().argmin(-1)]


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8_e4m3", "fp4"])
def test_every_head_has_its_own_scale(dtype, build, keys_of, attention):
    """Against a float model whose attention is given keys and values rounded head by head."""
    largest, grid = GRIDS[dtype]
    seen = keys_of(build())
    scales = [[x.abs().amax((0, 2, 3)) / largest for x in layer[1:]] for layer in seen]
    model = quantized(build(), config_of(replace(HEAD, dtype=dtype)), [IDS])
    for layer, pair in zip(model.model.layers, scales, strict=True):
        projections = layer.self_attn.k_proj, layer.self_attn.v_proj
        for projection, expected in zip(projections, pair, strict=True):
            assert len(expected) == 2
            assert torch.equal(projection.output_quantizer.scale, expected)
            assert expected.unique().numel() == 2

    def by_hand(module, query, key, value, *args, **kwargs):
        columns = [scale.view(1, -1, 1, 1) for scale in scales[module.layer_idx]]
        key, value = (
            nearest(x * s.reciprocal() if dtype.startswith("int") else x / s, grid) * s
            for x, s in zip((key, value), columns, strict=True)
        )
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    expected = build()
    expected.set_attn_implementation(attention(by_hand))
    torch.testing.assert_close(logits_of(model), logits_of(expected), rtol=0, atol=1e-5)
