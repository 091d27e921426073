"""Architectures whose tensors Transformers renames or fuses when it loads them."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from quark.torch import LLMTemplate, ModelImporter, ModelQuantizer, export_safetensors
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.transformers_names import rename_for_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
IDS = torch.arange(12).view(2, 6)


def build(name):
    torch.manual_seed(0)
    if name == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).eval()
    if name == "mixtral":
        config = MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
        return MixtralForCausalLM(config).eval()
    config = Qwen2MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return Qwen2MoeForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["gpt_neox", "mixtral", "qwen2_moe"])
def test_import_gives_the_frozen_model(name, tmp_path):
    model = build(name)
    config = LLMTemplate.get(name).get_config("int4_wo_32")
    frozen = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    export_safetensors(frozen, tmp_path / "out")
    with torch.no_grad(), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(frozen.config)
    loaded = ModelImporter(tmp_path / "out", "safetensors").import_model_info(empty)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, frozen(IDS).logits)


def test_headers_of_fused_tensors_are_known_without_reading(tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    reader = rename_for_model(CheckpointReader(tmp_path), model)
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    assert not any(fused in name for name in CheckpointReader(tmp_path).entries)
    assert reader.entries[fused].shape == tuple(model.state_dict()[fused].shape)
    assert {name for name, _ in reader.tensors()} == set(reader.entries) == set(model.state_dict())


def test_names_that_fit_stay(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path)
    reader = CheckpointReader(tmp_path)
    assert rename_for_model(reader, torch.nn.Linear(2, 2)) is reader
    assert rename_for_model(reader, model).entries == reader.entries
