"""Functions that serving software imports, beside ml_dtypes and written-out scales."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.kernel import mx
from quark.torch.kernel.hw_emulation.hw_emulation_interface import (
    dequantize_fp4_fp6_per_group,
    fake_quantize_fp4_fp6_per_group_with_scale,
)
from quark.torch.quantization.config.config import (
    Config,
    OCP_MXFP4Spec,
    OCP_MXFP6E2M3Spec,
    QuantizationConfig,
)
from quark.torch.quantization.utils import even_round, reshape_to_blocks
from quark.torch.utils.pack import create_pack_method

NUMPY = {
    "fp4": ml_dtypes.float4_e2m1fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
}
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(values, name):
    """Values in a narrow format, float64; beyond its range they saturate."""
    largest = float(ml_dtypes.finfo(NUMPY[name]).max)
    return np.clip(values, -largest, largest).astype(NUMPY[name]).astype(np.float64)


def even_scale(amax, name):
    """The scale of a block: amax is rounded, half up, to the bits that elements keep."""
    info = ml_dtypes.finfo(NUMPY[name])
    fraction, exponent = math.frexp(float(amax))  # amax = fraction * 2^exponent, from 1/2 to 1
    steps = 2 ** (info.nmant + 1)
    carry = math.floor(fraction * steps + 0.5) == steps
    return 2.0 ** (exponent - 1 + carry - math.frexp(float(info.max))[1] + 1)


def spread(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    factors = torch.randint(-9, 9, (*shape[:-1], 1), generator=generator)
    return (x * torch.exp2(factors)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize(("shape", "axis"), [((8, 96), -1), ((64, 6), 0), ((3, 4, 70), 2)])
def test_blocks_under_their_scales(name, dtype, shape, axis):
    x = spread(0, shape, dtype)
    blocks = reshape_to_blocks(x, 32, axis)
    length = shape[axis]
    assert blocks.shape[-2:] == (-(-length // 32), 32)
    amax = blocks.abs().amax(-1).float()
    scale = even_round(amax, name)
    wanted = [even_scale(value, name) for value in amax.flatten()]
    assert scale.flatten().tolist() == wanted
    y = fake_quantize_fp4_fp6_per_group_with_scale(
        x, scale.movedim(-1, axis), axis=axis, group_size=32, quant_dtype=name
    )
    ratio = blocks.double().numpy() / scale.double().numpy()[..., None]
    values = rounded(ratio, name) * scale.double().numpy()[..., None]
    values = torch.from_numpy(values).flatten(-2)[..., :length].movedim(-1, axis)
    assert y.dtype == dtype
    assert torch.equal(y, values.to(dtype))
    if name == "fp4" and axis != 0:
        assert torch.equal(mx.qdq_mxfp4(x), y)


def test_scales_of_extremes():
    amax = torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max])
    assert even_round(amax, "fp4").tolist() == [2.0**-127, 2.0**-127, 2.0**126]


@pytest.mark.parametrize("name", NUMPY)
def test_every_code(name):
    bits = 4 if name == "fp4" else 6
    codes = np.arange(1 << bits, dtype=np.uint8)
    word = {4: 2, 6: 4}[bits]
    number = [sum(int(c) << (bits * i) for i, c in enumerate(g)) for g in codes.reshape(-1, word)]
    packed = torch.tensor([n >> (8 * b) & 0xFF for n in number for b in range(word * bits // 8)])
    values = create_pack_method(None, dtype=name).unpack(packed.to(torch.uint8), reorder=False)
    assert np.array_equal(values.numpy(), codes.view(NUMPY[name]).astype(np.float32))
    scale = torch.tensor([2.0**-3, 2.0, 0.5, 4.0])[: len(codes) // 16]
    result = dequantize_fp4_fp6_per_group(values, scale, axis=-1, group_size=16, quant_dtype=name)
    assert torch.equal(result, values * scale.repeat_interleave(16))


@pytest.mark.parametrize(
    ("spec", "name"), [(OCP_MXFP4Spec, "fp4"), (OCP_MXFP6E2M3Spec, "fp6_e2m3")]
)
def test_a_checkpoint(spec, name, build, tmp_path):
    """A server reads packed weights and exponents of a file, and gets our values."""
    from safetensors.torch import load_file

    config = Config(
        QuantizationConfig(weight=spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())
    )
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(build()))
    export_safetensors(model, tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    names = [n.removesuffix("_scale") for n in files if n.endswith("weight_scale")]
    reloaded = import_model_from_safetensors(build(), tmp_path)
    assert names
    for key in names:
        words, exponents = files[key], files[f"{key}_scale"]
        if name == "fp4":
            values = mx.dq_mxfp4(words, exponents, torch.float32)
        else:
            values = dequantize_fp4_fp6_per_group(
                create_pack_method(None, dtype=name).unpack(words, reorder=False),
                torch.exp2(exponents.float() - 127),
                axis=-1,
                group_size=32,
                quant_dtype=name,
            )
        layer = reloaded.get_submodule(key.removesuffix(".weight"))
        assert isinstance(layer, nn.Linear)
        assert torch.equal(values, layer.value("weight", torch.float32))


def test_compiled_without_breaks():
    x = spread(1, (4, 64), torch.float32)
    compiled = torch.compile(lambda x: mx.qdq_mxfp4(x, "even") * 2, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), mx.qdq_mxfp4(x) * 2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w: mx.qdq_mxfp4(x, "odd"), r"scale_calculation_mode='odd'.*'even'"),
        (lambda x, w: mx.dq_mxfp4(w, w, torch.half), r"exponents of shape \(4, 2\); \(4, 32\)"),
        (lambda x, w: mx.dq_mxfp4(x, w, torch.half), "uint8; torch.float32 and torch.uint8"),
        (lambda x, w: even_round(x, "int4"), "fp4, fp6_e2m3, fp6_e3m2; 'int4' was given"),
        (
            lambda x, w: fake_quantize_fp4_fp6_per_group_with_scale(x, x, -1, 32, "fp4"),
            "has 8 blocks",
        ),
        (
            lambda x, w: create_pack_method(None, "fp6_e3m2").unpack(w),
            r"words of 3 bytes.*torch.uint8 of shape \(4, 32\)",
        ),
    ],
)
def test_what_does_not_fit(call, said):
    words = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match=said):
        call(torch.ones(4, 64), words)
