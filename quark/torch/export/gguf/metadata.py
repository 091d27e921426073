"""Hyperparameters of a model in the header of a GGUF file."""

from __future__ import annotations

from typing import Any

from quark.torch.earlier_output import WRITER
from quark.torch.export.gguf.architectures import head_size
from quark.torch.export.gguf.rope import DEFAULT_THETA, rope_parameters


def add_metadata(writer: Any, config: Any, name: str, rms: bool) -> None:
    """Add the hyperparameters of a model.

    Args:
        writer: A GGUFWriter.
        config: Configuration of the model in Transformers.
        name: Name of the model.
        rms: Whether norms are RMSNorm.
    """
    heads, head = config.num_attention_heads, head_size(config)
    rope = rope_parameters(config)
    rotated = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1
    writer.add_name(name)
    writer.add_quantized_by(WRITER)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(_key_value_heads(config))
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(int(rotated * head))
    writer.add_rope_freq_base(float(rope.get("rope_theta", DEFAULT_THETA)))
    if rope.get("rope_type") == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rms:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    optional = {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for field, add in optional.items():
        value = getattr(config, field, None)
        if value is not None and (field != "sliding_window" or _uses_window(config)):
            add(value)


def _uses_window(config: Any) -> bool:
    """Whether a layer of the model attends to a sliding window only."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


def _key_value_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
