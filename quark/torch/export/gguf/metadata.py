"""Architectures that GGUF knows, and the numbers that describe a model there."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class Architecture(NamedTuple):
    """How a family of Transformers is stored in GGUF.

    Attributes:
        name: Name of the architecture.
        interleaves: Whether rotary embedding turns neighbours, so that the rows of queries and keys
            have another order than in Transformers, which turns halves.
        norm_offset: What is added to the weights of norms.
        rms: Whether norms are by root mean square.
    """

    name: str
    interleaves: bool = False
    norm_offset: int = 0
    rms: bool = True


ARCHITECTURES = {
    "llama": Architecture("llama", interleaves=True),
    "mistral": Architecture("llama", interleaves=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", norm_offset=1),
    "gemma2": Architecture("gemma2", norm_offset=1),
    "gemma3_text": Architecture("gemma3", norm_offset=1),
    "phi": Architecture("phi2", rms=False),
    "phi3": Architecture("phi3"),
}
_SCALINGS = ("default", "linear", "llama3")


def architecture_of(config: Any) -> Architecture:
    """Return how a model is stored.

    Raises:
        ValueError: Its family, or the scaling of its rotary embedding, is not known here.
    """
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"GGUF export knows the model types {', '.join(ARCHITECTURES)}, not {kind!r}. Write "
            "safetensors instead, and convert them with the tools of llama.cpp."
        )
    scaling = rope_of(config).get("rope_type", "default")
    if scaling not in _SCALINGS:
        raise ValueError(
            f"GGUF export knows rotary embedding scaled by {', '.join(_SCALINGS)}, not {scaling!r}."
        )
    return ARCHITECTURES[kind]


def rope_of(config: Any) -> dict[str, Any]:
    """Return the parameters of the rotary embedding, of full attention where there are several."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    return dict(found.get("full_attention", found))


def add_metadata(writer: Any, config: Any, name: str, rms: bool) -> None:
    """Add the numbers that describe the model.

    Args:
        writer: A GGUFWriter.
        config: Configuration of the model in Transformers.
        name: Name of the model.
        rms: Whether norms are by root mean square.
    """
    heads, head = config.num_attention_heads, head_size(config)
    rope = rope_of(config)
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None)) or 1
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads(config))
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(int(part * head))
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
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
        if value is not None and (field != "sliding_window" or uses_window(config)):
            add(value)


def uses_window(config: Any) -> bool:
    """Whether a layer of the model attends to a window of tokens alone."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


def head_size(config: Any) -> int:
    """Width of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def key_heads(config: Any) -> int:
    """Heads of keys and values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def interleaved_rows(rows: int, head: int) -> torch.Tensor:
    """Return the order of rows in which the halves of each head alternate: (rows,) indices."""
    return torch.arange(rows).reshape(-1, 2, head // 2).transpose(1, 2).flatten()


def rope_factors(model: nn.Module, config: Any) -> torch.Tensor | None:
    """Return what each frequency is divided by, where scaling differs between them: (head / 2,)."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    base, head = float(rope["rope_theta"]), head_size(config)
    unscaled = base ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    scaled = next(b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq"))
    return unscaled / scaled.cpu().float()
