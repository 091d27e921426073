"""What can be rescaled in the decoder architectures of Transformers is found and does no harm."""

import re
from collections import defaultdict

import pytest
import torch

from quark.torch.graph.discovery import discover
from quark.torch.quantization.nn.experts import split_experts
from tests.models.architectures import InDouble, build, inputs, small_config

# Producer -> consumers in the last block and after it, by the last part of their names.
_QKV = "q_proj k_proj v_proj"
_ATTENTION = {"input_layernorm": _QKV, "v_proj": "o_proj"}
_MLP = {"post_attention_layernorm": "gate_proj up_proj", "up_proj": "down_proj"}
_LLAMA = _ATTENTION | _MLP
_HEAD = {"norm": "lm_head"}
_GEMMA2 = _ATTENTION | {
    "pre_feedforward_layernorm": "gate_proj up_proj",
    "up_proj": "down_proj",
}
_NEOX = {
    "input_layernorm": "query_key_value",
    "query_key_value": "dense",
    "post_attention_layernorm": "dense_h_to_4h",
}
_LATENT = {
    "input_layernorm": "q_a_proj kv_a_proj_with_mqa",
    "q_a_layernorm": "q_b_proj",
    "kv_a_layernorm": "kv_b_proj",
    "kv_b_proj": "o_proj",
    "post_attention_layernorm": "gate gate_proj up_proj",
    "up_proj": "down_proj",
}
WELL_KNOWN = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "stablelm"), _LLAMA | _HEAD),
    "gemma": _LLAMA,
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA2),
    "phi": {"input_layernorm": f"{_QKV} fc1", "v_proj": "dense", "final_layernorm": "lm_head"},
    "phi3": {
        "input_layernorm": "qkv_proj",
        "qkv_proj": "o_proj",
        "post_attention_layernorm": "gate_up_proj",
        "gate_up_proj": "down_proj",
    }
    | _HEAD,
    "opt": {
        "self_attn_layer_norm": _QKV,
        "v_proj": "out_proj",
        "final_layer_norm": "fc1",
        "fc1": "fc2",
    },
    "gpt2": {"ln_1": "c_attn", "c_attn": "c_proj", "ln_2": "c_fc"},
    "gpt_neox": _NEOX | {"final_layer_norm": "lm_head"},
    "gptj": {"ln_1": f"{_QKV} fc_in", "v_proj": "out_proj", "ln_f": "lm_head"},
    "bloom": _NEOX,
    "falcon": {"input_layernorm": "query_key_value dense_h_to_4h", "query_key_value": "dense"},
    "cohere": {
        "input_layernorm": f"{_QKV} gate_proj up_proj",
        "v_proj": "o_proj",
        "up_proj": "down_proj",
    },
    "olmo": {"v_proj": "o_proj", "up_proj": "down_proj"},
    "olmo2": {"v_proj": "o_proj", "up_proj": "down_proj"} | _HEAD,
    "starcoder2": _ATTENTION | {"post_attention_layernorm": "c_fc"},
    "mixtral": _ATTENTION | {"post_attention_layernorm": "gate w1 w3", "w3": "w2"} | _HEAD,
    "qwen2_moe": _LLAMA
    | {"post_attention_layernorm": "gate gate_proj up_proj shared_expert_gate"}
    | _HEAD,
    "qwen3_moe": _LLAMA | {"post_attention_layernorm": "gate gate_proj up_proj"} | _HEAD,
    "deepseek_v2": _LATENT | _HEAD,
    "deepseek_v3": _LATENT | _HEAD,
}
OTHERS = [
    *("afmoe", "apertus", "arcee", "axk1", "axk2", "bailing_hybrid", "bamba", "biogpt"),
    *("bitnet", "codegen", "cohere2", "cohere2_moe", "ctrl", "cwm", "deepseek_v32"),
    *("deepseek_v4", "diffllama", "doge", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("falcon_h1", "falcon_mamba", "flex_olmo", "gemma3n_text", "glm", "glm4", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "gpt_bigcode", "gpt_neo", "gpt_oss", "granitemoe"),
    *("granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("hy_v3", "internlm3", "jais2", "jamba", "jetmoe", "kolibri1", "laguna", "lfm2"),
    *("llama4_text", "longcat_flash", "mamba", "mamba2", "mellum", "mimo_v2_flash", "minicpm3"),
    *("minimax", "minimax_m2", "ministral", "modernbert-decoder", "moshi", "mpt", "nanochat"),
    *("nemotron", "nemotron_h", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "persimmon"),
    *("phimoe", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "seed_oss"),
    *("smollm3", "solar_open", "vaultgemma", "youtu", "zaya"),
    *("blt", "cohere_compass_text", "dbrx", "dots3_note", "emu3", "fuyu", "gemma3", "gemma4"),
    *("gemma4_unified", "git", "got_ocr2", "hy_v4", "inkling_text", "inkling2_text", "lfm3"),
    *("llama4", "mbart", "mllama", "musicgen", "musicgen_melody", "pegasus", "phi4_multimodal"),
    *("prophetnet", "qwen3_5", "qwen4_exp", "reformer", "roc_bert", "whisper", "xlstm", "xmod"),
    *("zamba", "zamba2"),
]


@pytest.fixture(scope="module")
def found():
    """The structure of an architecture, and how far rescaling everything moves its logits."""
    known = {}

    def look(name):
        if name not in known:
            torch.set_num_threads(1)
            model = build(small_config(name, use_cache=False))
            split_experts(model)
            with InDouble(), torch.no_grad():
                before = model(**inputs(model)).logits
                structure = discover(model, inputs(model))
                generator = torch.Generator().manual_seed(3)
                for group in structure.groups:
                    factors = torch.rand(group.size, generator=generator, dtype=torch.float64)
                    group.apply_(model, factors * 1.5 + 0.5)
                after = model(**inputs(model)).logits
            known[name] = structure, float((after - before).norm() / before.norm())
        return known[name]

    return look


@pytest.mark.parametrize("name", [*WELL_KNOWN, *OTHERS])
@pytest.mark.sampled(8)
def test_rescaling_all_groups_changes_no_logit(found, name):
    structure, change = found(name)
    assert structure.groups
    assert change < 1e-9


@pytest.mark.parametrize("name", WELL_KNOWN)
@pytest.mark.sampled(3)
def test_the_groups_of_well_known_models(found, name):
    structure, _ = found(name)
    groups = defaultdict(set)
    for group in structure.groups:
        if group.block in (structure.blocks[-1], ""):
            groups[_last(group.producer)] |= {_last(consumer) for consumer in group.consumers}
    assert groups == {key: set(value.split()) for key, value in WELL_KNOWN[name].items()}


@pytest.mark.parametrize(
    ("name", "producer", "said"),
    [
        ("llama", "self_attn.q_proj", "that depends on it"),  # rotary embedding mixes two rows
        ("llama", "self_attn.o_proj", "added to another tensor"),
        ("llama", "mlp.gate_proj", "silu"),
        ("gpt2", "mlp.c_fc", "goes through"),
        ("olmo2", "post_feedforward_layernorm", "added to another tensor"),
        ("gemma", "model.norm", "embed_tokens.weight is also read by embedding"),
    ],
)
def test_what_cannot_be_rescaled_has_a_reason(found, name, producer, said):
    structure, _ = found(name)
    reasons = [r.reason for r in structure.rejected if r.producer.endswith(producer)]
    assert reasons
    assert all(re.search(said, reason) for reason in reasons)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_every_expert_is_a_consumer_and_a_producer(found, name):
    structure, _ = found(name)
    block = structure.blocks[-1]
    norm = next(g for g in structure.groups if g.producer == f"{block}.post_attention_layernorm")
    reading = {m[1] for c in norm.consumers if (m := re.search(r"experts\.(\d+)\.", c))}
    assert reading == {"0", "1", "2", "3"}
    producers = {
        m[1] for g in structure.groups if (m := re.search(rf"{block}.*experts\.(\d)", g.producer))
    }
    assert producers == reading


def test_factors_pass_a_gated_convolution_of_single_channels(found):
    structure, _ = found("lfm2_moe")
    group = next(g for g in structure.groups if g.producer.endswith("conv.in_proj"))
    assert [_last(consumer) for consumer in group.consumers] == ["out_proj"]
    assert group.size == 64
    (produced,) = (e for e in group.edits if e.parameter.endswith("in_proj.weight"))
    assert (produced.index >= 0).nonzero().flatten().tolist() == list(range(128, 192))


def _last(name):
    return name.rpartition(".")[2]
