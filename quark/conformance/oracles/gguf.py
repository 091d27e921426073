"""Blocks of ggml by the package gguf, which llama.cpp publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import signed_blocks
from quark.conformance.results import in_blocks
from quark.conformance.samples import usual_values
from quark.torch.export.gguf.block_types import BLOCK_TYPES
from quark.torch.export.gguf.blocks import block_spec, pack_blocks, unpack_blocks
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES

FORMATS = {
    **{"Q4_0": "int4", "Q4_1": "uint4", "Q8_0": "int8", "IQ4_NL": "iq4_nl"},
    **{"MXFP4": "fp4", "NVFP4": "fp4", "Q5_0": "int5"},
}
SUPER_BLOCKS = {"Q2_K": "uint2", "Q3_K": "int3", "Q4_K": "uint4", "Q5_K": "uint5", "Q6_K": "int6"}
ROUNDED = {"Q4_0": "q4_0", "Q5_0": "q5_0"}  # types -> schemes with the same scales


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare values of blocks that gguf writes, and the bytes of these blocks written again.

    Args:
        every: Not used: the blocks are few.
    """
    from gguf import GGMLQuantizationType, quants

    for kind, name in FORMATS.items():
        x = _multiples() if kind == "Q4_1" else usual_values(256, 128)
        number = GGMLQuantizationType[kind]
        make = _GIVEN.get(kind)
        data = make() if make is not None else quants.quantize(x.numpy(), number)
        blocks = torch.from_numpy(data.copy())
        theirs = torch.from_numpy(quants.dequantize(data, number))
        state = unpack_blocks(blocks, block_spec(kind, blocks, kind), kind)
        assert state.codes is not None
        ours = dequantize(state.codes, state.scale, state.zero_point, state.scheme)
        yield compare(name, f"{kind}, values", ours + 0.0, theirs + 0.0)
        yield compare(name, f"{kind}, bytes", pack_blocks(state, kind), blocks)
    for kind, name in SUPER_BLOCKS.items():
        blocks = super_blocks(kind)
        theirs = quants.dequantize(blocks.numpy(), GGMLQuantizationType[kind])
        state = unpack_blocks(blocks, block_spec(kind, blocks, kind), kind)
        again = quants.dequantize(pack_blocks(state, kind).numpy(), GGMLQuantizationType[kind])
        written = torch.from_numpy(again) + 0.0, torch.from_numpy(theirs) + 0.0
        yield compare(name, f"{kind}, values of blocks written again", *written)
        if not BLOCK_TYPES[kind].scheme.has_minima:  # here, minima are quotients: zero points
            ours = state.value(torch.float32)
            yield compare(name, f"{kind}, values", ours + 0.0, torch.from_numpy(theirs) + 0.0)
    for kind, scheme_name in ROUNDED.items():
        x = usual_values(256, 128)
        spec = BLOCK_SCHEMES[scheme_name].spec()
        data = quants.quantize(x.numpy(), GGMLQuantizationType[kind])
        theirs = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[kind]))
        ours = in_blocks(x, spec.scheme)
        wanted = signed_blocks(x.reshape(-1, 32), spec.fmt).reshape(x.shape)
        yield compare(FORMATS[kind], f"{kind}, round", ours + 0.0, wanted + 0.0, theirs + 0.0, x)


def super_blocks(kind: str) -> torch.Tensor:
    """Return rows of any codes and factors under numbers of both signs in float16, (64, bytes)."""
    generator = torch.Generator().manual_seed(5)
    form = BLOCK_TYPES[kind]
    blocks = torch.randint(0, 256, (64, 2, form.bytes), generator=generator).to(torch.uint8)
    start = 0
    for part in form.parts:
        width = form.part_bytes(part)
        if part in ("scale", "minimum"):
            numbers = torch.randn(64, 2, 1, generator=generator).half() / 100
            blocks[..., start : start + width] = numbers.view(torch.uint8)
        start += width
    return blocks.flatten(1)


def _nvfp4_blocks() -> Any:
    """Return rows of any codes under all positive scales in e4m3, (63, 72) uint8."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (63, 2, 36), generator=generator)
    scales = torch.arange(1, 127).repeat(4)[torch.randperm(504, generator=generator)]
    blocks[..., :4] = scales.reshape(63, 2, 4)
    return blocks.flatten(1).to(torch.uint8).numpy()


def _iq4_nl_blocks() -> Any:
    """Return rows of any codes under scales of both signs in float16, (256, 72) uint8."""
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (256, 4, 18), generator=generator).to(torch.uint8)
    scales = torch.randn(256, 4, 1, generator=generator).half()
    return torch.cat([scales.view(torch.uint8), blocks[..., 2:]], -1).flatten(1).numpy()


# Blocks of types to which the package does not round.
_GIVEN: dict[str, Callable[[], Any]] = {"NVFP4": _nvfp4_blocks, "IQ4_NL": _iq4_nl_blocks}


def _multiples() -> torch.Tensor:
    """Return blocks whose smallest values are multiples of their steps, (256, 128) float32.

    Q4_1 stores minima. Others have no exact zero point: values would differ in the last bit.
    """
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (256, 4, 32), generator=generator).float()
    codes[..., :2] = torch.tensor([0.0, 15.0])
    zeros = torch.randint(0, 16, (256, 4, 1), generator=generator)
    steps = torch.randint(1, 32, (256, 4, 1), generator=generator) / 64
    return ((codes - zeros) * steps).flatten(1)
