"""Hyperparameters of a model in the header of a GGUF file."""

from __future__ import annotations

from math import inf
from typing import Any

from quark.torch.earlier_output import WRITER
from quark.torch.export.checkpoint.architecture import made_config
from quark.torch.export.gguf.architectures import ARCHITECTURES, Architecture, head_size
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.gguf.rope import DEFAULT_THETA, add_scaling, rope_parameters

# Key of the header, after the architecture -> field of configurations of Transformers.
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "vocab_size": "vocab_size",
    **_EXPERTS,
}
_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_REQUIRED = ("context_length", "embedding_length", "block_count", "attention.head_count")
_REQUIRED_OF_MIXTURES = ("expert_count", "expert_used_count")
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def add_metadata(writer: Any, config: Any, name: str, architecture: Architecture) -> None:
    """Add the hyperparameters of a model.

    Args:
        writer: A GGUFWriter.
        config: Configuration of the model in Transformers.
        name: Name of the model.
        architecture: How the model family is stored.
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
    add_scaling(writer, rope, architecture.name)
    if architecture.rms:
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
    for key, field in _FACTORS.items():
        if hasattr(config, field):
            writer.add_float32(f"{architecture.name}.{key}", float(getattr(config, field)))
    if architecture.normalizes is not None:
        for key, field in _EXPERTS.items():
            if hasattr(config, field):
                writer.add_uint32(f"{architecture.name}.{key}", getattr(config, field))
        if not hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.intermediate_size)


def _uses_window(config: Any) -> bool:
    """Whether a layer of the model attends to a sliding window only."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or "sliding_attention" in kinds


def _key_value_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def header_config(file: GgufFile) -> Any | None:
    """Return the configuration in Transformers that the header of a file describes.

    Returns:
        The configuration; None for models without experts that Transformers reads itself. It reads
        some mixtures as models without experts, and leaves out their widths.

    Raises:
        ValueError: A number is missing, contradicts another one, or is none that a model has.
    """
    kind = _model_type(file)
    if kind is None:
        return None
    known, architecture = made_config({"model_type": kind}, file.path), ARCHITECTURES[kind]
    described: dict[str, Any] = {
        "model_type": kind,
        "tie_word_embeddings": _HEAD not in file.tensors,
    }
    for name, field in _TOKENS.items():
        described[field] = file.values.get(f"tokenizer.ggml.{name}_token_id")
    required = _REQUIRED if architecture.normalizes is None else _REQUIRED + _REQUIRED_OF_MIXTURES
    for key, field in _SIZES.items():
        is_known = hasattr(known, field) or field == "head_dim"
        if key in required or (is_known and _key(file, key) in file.values):
            described[field] = _count(file, key)
    described.setdefault("num_key_value_heads", described["num_attention_heads"])
    if _EMBEDDING in file.tensors:
        described.setdefault("vocab_size", file.tensors[_EMBEDDING].shape[0])
    if architecture.rms:
        described["rms_norm_eps"] = _number(file, "attention.layer_norm_rms_epsilon")
    else:
        described["layer_norm_eps"] = _number(file, "attention.layer_norm_epsilon")
    for key, field in _FACTORS.items():
        if hasattr(known, field):
            described[field] = _number(file, key, getattr(known, field))
    if hasattr(known, "norm_topk_prob"):
        described["norm_topk_prob"] = architecture.normalizes
    described["rope_parameters"] = _rotation(file, described, known)
    return made_config(described, file.path)


def _rotation(file: GgufFile, described: dict[str, Any], known: Any) -> dict[str, Any]:
    """Return the parameters of rotary embedding, without its scaling.

    Args:
        file: The file.
        described: Fields of the configuration.
        known: The default configuration of this type of model.
    """
    theta = _number(file, "rope.freq_base", DEFAULT_THETA)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    heads = described["num_attention_heads"]
    head = described.get("head_dim", described["hidden_size"] // heads)
    rotated = file.values.get(_key(file, "rope.dimension_count"), head)
    if "partial_rotary_factor" in rope_parameters(known) and type(rotated) is int:
        return rope | {"partial_rotary_factor": rotated / head}
    if rotated != head:
        raise ValueError(
            f"{file.path}: {_key(file, 'rope.dimension_count')} is {rotated!r}, but heads have "
            f"{head} elements, and all of them are rotated in this type of model. Correct one."
        )
    return rope


def _model_type(file: GgufFile) -> str | None:
    """Return the type of the model of a file, if its header is read here."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    name = file.values.get("general.architecture")
    has_experts = bool(file.values.get(_key(file, "expert_count")))
    for kind, architecture in ARCHITECTURES.items():
        is_mixture = architecture.normalizes is not None
        is_read = is_mixture if has_experts else name not in GGUF_SUPPORTED_ARCHITECTURES
        if architecture.name == name and is_read and is_mixture == has_experts:
            return kind
    return None


def _key(file: GgufFile, key: str) -> str:
    return f"{file.values.get('general.architecture')}.{key}"


def _count(file: GgufFile, key: str) -> int:
    """Return a positive integer of the header."""
    value = file.values.get(_key(file, key))
    if type(value) is not int or value < 1:
        raise _wrong(file, key, value, "a positive integer")
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    """Return a positive number of the header; ``default`` if it is not there."""
    value = file.values.get(_key(file, key), default)
    if type(value) is not float or not 0 < value < inf:
        raise _wrong(file, key, value, "a positive number")
    return value


def _wrong(file: GgufFile, key: str, value: Any, expected: str) -> ValueError:
    given = "has no" if value is None else f"has the {value!r} in"
    return ValueError(
        f"{file.path} {given} {_key(file, key)}, expected {expected}: it is damaged, or of an "
        "unsupported kind. Write it again."
    )
