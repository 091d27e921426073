"""Checkpoints that vLLM reads, by layout and by how layers are quantized.

The tables hold what docs/serving.md has as run or read with vLLM 0.32. Schemes with signed scales
count as the same schemes without: the layout is the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from quark.torch.quantization.config.description import LayerDescription

# Each entry is a pattern of the words of a layer: weight, " | ", input; see ``describe_layer``.
_SIGNED = r"( \(signed scales\))?"
_GROUPS = rf"u?int4 per group \d+ a?sym{_SIGNED} \| "
_INT8 = r"int8 per (tensor|channel) sym \| int8 per (tensor a?sym static|token sym dynamic)"
_FP8 = r"fp8_e4m3 per (tensor|channel) \| fp8_e4m3 per (tensor (static|dynamic)|token dynamic)"
_MX = r"(fp4|fp6_e3m2|fp6_e2m3|fp8_e4m3) per group 32 \(e8m0 scales\)"
_MX_INPUT = r"(fp4|fp6_e3m2|fp6_e2m3|fp8_e4m3) per group 32 dynamic \(e8m0 scales\)"
_NVFP4 = r"fp4 per group 16 \(fp8_e4m3 scales\) \| "
_NVFP4_INPUT = r"fp4 per group 16 dynamic \(fp8_e4m3 scales\)"
_MXFP4 = r"fp4 per group 32 \(e8m0 scales\) \| (fp4 per group 32 dynamic \(e8m0 scales\))?"
_MXFP8 = r"fp8_e4m3 per group 32 \(e8m0 scales\) \| fp8_e4m3 per group 32 dynamic \(e8m0 scales\)"
_FP8_BLOCKS = r"fp8_e4m3 per block 128x128 \| fp8_e4m3 per group 128 dynamic"
_FP8_STATIC = r"fp8_e4m3 per tensor \| fp8_e4m3 per tensor static"
_READ = {
    "quark": (
        _GROUPS,
        _INT8,
        _FP8,
        _FP8_BLOCKS,
        rf"{_MX} \| ({_MX_INPUT}|fp8_e4m3 per tensor static)?",
        _NVFP4 + _NVFP4_INPUT,
    ),
    "awq": (_GROUPS,),
    "gptq": (rf"int[48] per (group (\d+|row)|channel) sym{_SIGNED} \| ",),
    "compressed-tensors": (
        rf"u?int[2-8] per (group (\d+|row)|channel) a?sym{_SIGNED} \| ",
        r"int4 per group \d+ sym \| int8 per token sym dynamic",
        _INT8,
        _FP8,
        rf"{_NVFP4}({_NVFP4_INPUT})?",
        _MXFP4,
        _MXFP8,
    ),
    "modelopt": (_FP8_STATIC, rf"{_NVFP4}({_NVFP4_INPUT})?", _MXFP8),
    "fp8": (_FP8, _FP8_BLOCKS),
}
_OWN_EXPERTS = (_FP8, rf"{_MX} \| ({_MX_INPUT}|fp8_e4m3 per tensor static)?")
_CACHE = re.compile(r"(fp8_e4m3 per tensor.*)?")


def is_read(layout: str, schemes: Iterable[LayerDescription]) -> bool:
    """Whether vLLM has a scheme for all layers of a checkpoint.

    Args:
        layout: Name of the checkpoint format.
        schemes: How its layers are quantized.
    """
    patterns = _READ.get(layout, ())
    return all(_is_known(patterns, scheme) for scheme in schemes) and bool(patterns)


def reads_own(experts: Mapping[str, Collection[str]], schemes: Iterable[LayerDescription]) -> bool:
    """Whether vLLM reads the experts of a checkpoint in the layout of Quark.

    It does so where all layers have one scheme, of fp8 or MX: others it knows by the names of the
    layers inside, which merged experts have not.

    Args:
        experts: Schemes of the experts in each block, "" for those in float.
        schemes: How its layers are quantized.
    """
    if not any(kind for kinds in experts.values() for kind in kinds):
        return True
    words = {f"{scheme.weight} | {scheme.input}" for scheme in schemes}
    return len(words) == 1 and any(re.fullmatch(p, min(words)) for p in _OWN_EXPERTS)


def _is_known(patterns: Iterable[str], scheme: LayerDescription) -> bool:
    if scheme.output or not _CACHE.fullmatch(scheme.kv_cache):
        return False
    words = f"{scheme.weight} | {scheme.input}"
    return any(re.fullmatch(pattern, words) for pattern in patterns)
