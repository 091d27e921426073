"""Configurations that quantize the keys and values of a cache."""

import torch

from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    QuantizationSpec,
    RotationConfig,
)

FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
INT8 = Int8PerTensorSpec().to_quantization_spec()
TOKEN = QuantizationSpec(dtype="int8", qscheme="per_channel", ch_axis=1, is_dynamic=True)
GROUP = QuantizationSpec(
    dtype="int4", qscheme="per_group", ch_axis=-1, group_size=16, is_dynamic=True
)
HEAD = QuantizationSpec(dtype="int4", qscheme="per_head", is_dynamic=False)
R3 = RotationConfig(r1=False, r3=True)
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(4))


def config_of(spec=FP8, algorithms=None, layer=None, patterns=("*k_proj", "*v_proj"), **rest):
    """A configuration that quantizes keys after rotary embedding, values, and what is given."""
    cached = QuantizationConfig(output_tensors=spec)
    return Config(
        layer or QuantizationConfig(),
        kv_cache_quant_config=dict.fromkeys(patterns, cached),
        kv_cache_post_rope=True,
        algo_config=algorithms,
        exclude=["lm_head"],
        **rest,
    )
