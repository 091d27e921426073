"""Small mixtures of experts of the families that GGUF files hold."""

SIZES = {"num_experts_per_tok": 2, "initializer_range": 0.3}
# Type of the model -> what it needs besides, and the names of the matrices of an expert.
MIXTURES = {
    "mixtral": ({"num_local_experts": 4}, ("w1", "w3", "w2")),
    "qwen2_moe": (
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 128},
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "qwen3_moe": (
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "gpt_oss": (
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
        ("gate_up_proj", "down_proj"),
    ),
    "olmoe": (
        {"num_experts": 4, "num_key_value_heads": 4, "pad_token_id": None},
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # in the order of the names above


def changes_of(kind, **more):
    """Return the changes to the configuration of a small model."""
    return {**SIZES, **MIXTURES[kind][0], **more}
