"""Scales of a key-value cache, as checkpoints of other tools store them.

A quantized cache is configured here as the outputs of ``k_proj`` and ``v_proj``. Checkpoints store
its scales beside these layers: ``self_attn.k_scale``, not ``self_attn.k_proj.output_scale``.
"""

from __future__ import annotations

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype

SCALE_NAMES = {"k_proj": "k_scale", "v_proj": "v_scale"}
STATIC_FP8 = QuantizationSpec(Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, is_dynamic=False)


def is_static_fp8(spec: QuantizationSpec) -> bool:
    """Whether a tensor is quantized to fp8_e4m3 with one static scale."""
    one = spec.dtype is Dtype.fp8_e4m3 and spec.scheme.qscheme is QSchemeType.per_tensor
    return one and not spec.is_dynamic and spec.second_stage is None


def kv_cache_config(spec: QuantizationSpec | None) -> dict[str, QuantizationConfig]:
    """Return ``kv_cache_quant_config`` for a cache quantized by ``spec``, {} without one."""
    if spec is None:
        return {}
    return {f"*{name}": QuantizationConfig(output_tensors=spec) for name in SCALE_NAMES}


def cache_scale_name(key: str) -> str:
    """Return the stored name of a tensor: ``….k_scale`` for ``….k_proj.output_scale``."""
    path, _, last = key.rpartition(".")
    parent, _, layer = path.rpartition(".")
    if last == "output_scale" and layer in SCALE_NAMES:
        return f"{parent}.{SCALE_NAMES[layer]}"
    return key


def cache_state_name(key: str) -> str | None:
    """Return the name in the model's state of a scale of the cache, None for other tensors."""
    parent, _, last = key.rpartition(".")
    layer = next((layer for layer, scale in SCALE_NAMES.items() if scale == last), None)
    return layer and f"{parent}.{layer}.output_quantizer.scale"
