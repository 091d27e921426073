"""Models whose keys cannot be quantized are refused before any work."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    RotationConfig,
)
from quark.torch.quantization.nn.attention import key_routes
from quark.torch.quantization.nn.experts import split_experts
from tests.models.architectures import build as build_small
from tests.models.architectures import small_config, tokens
from tests.unit.quantization.nn.caches import FP8, IDS, R3, TOKEN, config_of


class Own(nn.Module):
    """A model that is none of Transformers."""

    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(64, 64)

    def forward(self, ids):
        return self.k_proj(torch.nn.functional.one_hot(ids, 64).float())


REFUSED = {
    "own": (Own, "*k_proj", "does not use the attention interface"),
    "bloom": ("bloom", "*query_key_value", "does not use the attention interface"),
    "minimax": ("minimax", "*qkv_proj", "does not use the attention interface"),
    "latent": ("deepseek_v3", "*kv_b_proj", "kv_b_proj does not compute them"),
    "values": ("llama", "*v_proj", "v_proj does not compute them"),
    "elsewhere": ("llama", "*o_proj", "o_proj does not compute them"),
    "not reached": ("gemma3", "*vision_tower*k_proj", "its k_proj did not run"),
}


@pytest.mark.parametrize(("name", "pattern", "said"), REFUSED.values(), ids=REFUSED)
def test_refused_before_any_work(name, pattern, said, unchanged):
    model = name() if name is Own else build_small(small_config(name), torch.float32)
    split_experts(model)
    config = config_of(patterns=(pattern,), algorithms=[RotationConfig()])
    with unchanged(model), pytest.raises(ValueError, match=said):
        ModelQuantizer(config).quantize_model(model, [tokens()])
    assert not key_routes(model)


def test_keys_that_other_layers_read_too(unchanged):
    model = build_small(small_config("gemma3n_text", num_kv_shared_layers=1), torch.float32)
    with unchanged(model), pytest.raises(ValueError, match="other layers read them too"):
        ModelQuantizer(config_of()).quantize_model(model, [tokens()])


def test_a_failure_later_leaves_no_trace(build, unchanged):
    model = build()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = 3e38  # outputs overflow
    with unchanged(model), pytest.raises(ValueError, match=r"output of .*k_proj was NaN"):
        ModelQuantizer(config_of(FP8, [R3])).quantize_model(model, [IDS])
    assert not key_routes(model) and model.model.layers[0].self_attn.config is model.config


def test_no_data_is_needed_for_ranges_of_each_token(build):
    ModelQuantizer(config_of(TOKEN)).quantize_model(build())
    with pytest.raises(ValueError, match="dataloader is empty"):
        ModelQuantizer(config_of(TOKEN)).quantize_model(build(), [])
