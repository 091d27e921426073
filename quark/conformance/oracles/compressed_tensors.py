"""Packing, scales and rotations of compressed-tensors, which vLLM loads."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import block_exponents, nearest
from quark.conformance.results import rounded
from quark.conformance.samples import block_values, half_values, usual_values
from quark.torch.export.formats.layouts.dense_words import pack_words
from quark.torch.numerics.exponents import shared_exponent
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.hadamard import hadamard
from quark.torch.numerics.packing import pack
from quark.torch.numerics.qdq import fake_quantize, quantize
from quark.torch.numerics.scheme import Scheme

MX_BITS = {"fp4": 4, "fp6_e2m3": 6}


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare words and bytes of codes, exponents of MX blocks, fp8 and int8 values, rotations.

    Args:
        every: Take one value of so many.
    """
    from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.utils import generate_mx_scales
    from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

    for bits in range(2, 9):
        generator = torch.Generator().manual_seed(bits)
        half = 1 << (bits - 1)
        codes = torch.randint(-half, half, (64, 60), dtype=torch.int8, generator=generator)
        ours = pack_words((codes + half).to(torch.uint8), bits)
        yield compare(f"int{bits}", "words without gaps", ours, pack_to_int32(codes, bits))
    for name, pack_values in (("fp4", pack_fp4_to_uint8), ("fp6_e2m3", pack_fp6_to_uint8)):
        fmt = Dtype[name].value
        values = rounded(usual_values(64, 64), fmt)
        ours = pack(quantize(values, torch.ones(()), None, Scheme(fmt)), fmt)
        yield compare(name, "bytes", ours, pack_values(values.clone()))
    amax = block_values(every).abs().amax(-1)
    for name, bits in MX_BITS.items():
        fmt = Dtype[name].value
        largest = torch.finfo(torch.float32).max * fmt.max_value  # no element is computed
        wanted = block_exponents(amax, fmt, "even", largest) + 127
        ours = shared_exponent(amax, fmt, "even") + 127
        yield compare(
            name, "MX exponents, even", ours, wanted, generate_mx_scales(amax, bits), amax
        )
    yield from _values(every)
    for size in (2, 16, 64, 256):
        ours = hadamard(size) * size**0.5
        theirs = deterministic_hadamard_matrix(size, torch.float32)
        yield compare(f"Hadamard {size}", "signs", ours.sign(), theirs)


def _values(every: int) -> Iterator[Comparison]:
    """Compare values quantized under given scales."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle import forward

    x = half_values(every)
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor")
    fmt, one = Dtype.fp8_e4m3.value, torch.ones(())
    theirs = forward.fake_quantize(x, one, None, args)
    yield compare("fp8_e4m3", "fake_quantize", rounded(x, fmt), nearest(x, fmt), theirs, x)
    x, fmt = usual_values(256, 64), Dtype.int8.value
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="tensor")
    for scale in (0.25, 0.1):  # it divides by the scale
        factor = torch.tensor(scale)
        ours = fake_quantize(x, factor, None, Scheme(fmt))
        wanted = nearest(x * factor.reciprocal(), fmt).float() * factor
        theirs = forward.fake_quantize(x, factor, None, args)
        yield compare("int8", f"fake_quantize, scale {scale}", ours, wanted, theirs + 0.0, x)
