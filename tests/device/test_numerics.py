"""The same bits on a GPU as on a CPU, for every scheme."""

import pytest
import torch

from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.quantization.config.presets import scheme, scheme_names

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
SHAPES = [(64, 256), (33, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def specs():
    """Every distinct specification of a weight or an input that a preset has."""
    found = []
    for name in scheme_names():
        layer = scheme(name, 32)
        for tensor, spec in layer.specs():
            used = spec.for_parameter() if tensor == "weight" else spec
            if used.fmt.scaled and not used.quantizes_codes and used not in found:
                found.append(used)
    return found


def made(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[0, :32] = 0  # a block of zeros
    x[1] *= torch.logspace(-30, 4, shape[1])  # every magnitude
    return x.to(dtype)


def same(one, other):
    if one is None or other is None:
        return one is other
    other = other.cpu()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_step(shape, dtype):
    x = made(shape, dtype)
    for spec in specs():
        how = spec.scheme
        here, there = dynamic_qparams(x, how), dynamic_qparams(x.cuda(), how)
        assert all(same(a, b) for a, b in zip(here, there, strict=True)), spec
        codes, on_gpu = quantize(x, *here, how), quantize(x.cuda(), *there, how)
        assert same(codes, on_gpu), spec
        values = dequantize(codes, *here, how, dtype)
        assert same(values, dequantize(on_gpu, *there, how, dtype)), spec
        assert same(fake_quantize(x, *here, how), fake_quantize(x.cuda(), *there, how)), spec
        words, packed = pack(codes, how.fmt), pack(on_gpu, how.fmt)
        assert same(words, packed), spec
        assert same(codes, unpack(packed, how.fmt, codes.shape[-1])), spec


@pytest.mark.parametrize("name", ["int4_wo_32", "fp8", "ptpc_fp8", "mxfp4", "nvfp4"])
def test_quantized_weights_of_a_model(build, quantize, name):
    here, there = quantize(build(), name), quantize(build().cuda(), name)
    state = there.state_dict()
    for key, tensor in here.state_dict().items():
        if key.endswith("weight") or "weight_quantizer" in key:
            assert same(tensor, state[key]), key
