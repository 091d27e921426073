"""Tiny random models of the decoder architectures that Transformers can build.

A configuration takes every small value whose name it knows; few need more than that.
"""

import inspect

import torch
from torch.overrides import TorchFunctionMode

SMALL = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "adapter_input_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 64,
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 8,
    # length
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    # attention through a latent
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    # experts
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    "moe_num_experts": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # state spaces and linear attention
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # of the rotated part
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
}
_MAMBA = {"layer_types": ["mamba", "attention"]}
# What an architecture needs besides; None leaves its own value.
PARTICULARS = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": _LINEAR | _LATENT,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROTARY}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": _LATENT | {"per_layer_config": {}},
    "dots3_note_vision_encoder": {"per_layer_config": {}},
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 2},
    "musicgen_melody_decoder": {"num_codebooks": 2},
    "phi4_multimodal_audio": {
        "num_blocks": 2,
        **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel"), 64),
        "nemo_conv_channels": 64,
    },
    "prophetnet": {"num_hidden_layers": None},
    "qwen4_exp_text": _LINEAR
    | {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 64,
        "hc_lowrank": 8,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 16,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [32, 32],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "feed_forward_size": 96,
        "num_buckets": 4,
        "hash_seed": 0,
        "num_hidden_layers": None,
    },
    "roc_bert": dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 64),
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "xlnet": {"max_position_embeddings": None},
    "zamba": _HYBRID,
    "zamba2": _HYBRID | {"hybrid_layer_ids": [1, 3], "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


VARIED = {  # kinds of models that algorithms meet, each with changes to its configuration
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "opt": ("opt", {}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "llama4": ("llama4_text", {"num_experts_per_tok": 1}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gemma": ("gemma", {}),
}


def small_config(name, **changes):
    """The configuration of a tiny model of an architecture."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    return kind(**small_options(kind(), name, **changes))


def small_options(plain, name, **changes):
    """The options that make a configuration small, those of its parts included."""
    from transformers import PreTrainedConfig

    optional = ("head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")
    values = plain.to_dict()
    names = {key: plain.attribute_map.get(key, key) for key in SMALL}
    known = {
        key: value
        for key, value in SMALL.items()
        if names[key] in values and (values[names[key]] is not None or key in optional)
    }
    for key in plain.sub_configs:
        part = getattr(plain, key, None)
        if isinstance(part, PreTrainedConfig):
            known[key] = small_options(part, part.model_type)
    known |= PARTICULARS.get(name, {}) | changes
    return {key: value for key, value in known.items() if value is not None}


def from_config(config):
    """The model of a configuration; one of several parts may be the decoder alone."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if not isinstance(config, kind.config_class):
        parts = (getattr(config, key) for key in config.sub_configs)
        config = next((part for part in parts if isinstance(part, kind.config_class)), config)
    return kind._from_config(config)


def parameter_count(config):
    """How many parameters a model would have."""
    with torch.device("meta"):
        return sum(p.numel() for p in from_config(config).parameters())


def build(config, dtype=torch.float64):
    """Make a model with random parameters, norms and biases included."""
    torch.manual_seed(0)
    model = from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter.detach(), mean=0.5 * is_gain, std=0.2)
    return model


def varied(name, dtype=torch.float32, **sizes):
    """Make one of ``VARIED``."""
    kind, changes = VARIED[name]
    return build(small_config(kind, **changes, **sizes), dtype)


def tokens(count=48):
    """Random tokens, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (2, count // 2), generator=generator)


def inputs(model):
    """Tokens, and what an encoder gave where a decoder can read that."""
    given = {"input_ids": tokens()}
    known = inspect.signature(model.forward).parameters
    names = [name for name in ("encoder_hidden_states", "encoder_outputs") if name in known]
    if names and (names[0] == "encoder_outputs" or getattr(model.config, "is_decoder", False)):
        count = len(given["input_ids"]) // getattr(model.config, "num_codebooks", 1)
        generator = torch.Generator().manual_seed(2)
        states = torch.randn(count, 7, model.config.hidden_size, generator=generator)
        states = states.to(model.dtype)
        given[names[0]] = states if "states" in names[0] else (states,)
    return given


class InDouble(TorchFunctionMode):
    """Compute in double precision what a model computes in single, such as its norms."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})
