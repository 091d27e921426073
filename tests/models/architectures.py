"""Tiny random models of the decoder architectures that Transformers can build.

A configuration takes every small value whose name it knows; few need more than that.
"""

import torch
from torch.overrides import TorchFunctionMode

SMALL = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # of the rotated part
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_MAMBA = {"layer_types": ["mamba", "attention"]}
# What an architecture needs besides; None leaves its own value.
PARTICULARS = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(
        ("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _LINEAR),
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": _LINEAR | _LATENT,
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
    "prophetnet": {"num_hidden_layers": None},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlnet": {"max_position_embeddings": None},
    "zamba": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(name, **changes):
    """The configuration of a tiny model of an architecture."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    plain = kind()
    optional = ("head_dim", "num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id")
    known = {
        key: value
        for key, value in SMALL.items()
        if hasattr(plain, key) and (getattr(plain, key) is not None or key in optional)
    }
    known |= PARTICULARS.get(name, {}) | changes
    return kind(**{key: value for key, value in known.items() if value is not None})


def parameter_count(config):
    """How many parameters a model would have."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def build(config, dtype=torch.float64):
    """Make a model with random parameters, norms and biases included."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, parameter in model.named_parameters():
        is_gain = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter.detach(), mean=0.5 * is_gain, std=0.2)
    return model


def tokens(count=48):
    """Random tokens, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 64, (2, count // 2), generator=generator)


class InDouble(TorchFunctionMode):
    """Compute in double precision what a model computes in single, such as its norms."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})
