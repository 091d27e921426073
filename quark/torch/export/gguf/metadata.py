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
_REQUIRED = (
    *("context_length", "embedding_length", "block_count", "attention.head_count"),
    *("expert_count", "expert_used_count"),
)
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


def has_experts(file: GgufFile) -> bool:
    """Whether the header of a file is that of a mixture of experts that this package knows."""
    return _mixture(file) is not None and bool(file.values.get(_key(file, "expert_count")))


def mixture_config(file: GgufFile) -> Any:
    """Return the configuration of a mixture of experts in Transformers.

    Transformers reads some mixtures as models without experts, and leaves out their widths.

    Args:
        file: A file for which ``has_experts`` is true.

    Raises:
        ValueError: A number is missing, contradicts another one, or is none that a model has.
    """
    kind = _mixture(file)
    assert kind is not None
    known = made_config({"model_type": kind}, file.path)
    theta = _number(file, "rope.freq_base", DEFAULT_THETA)
    described: dict[str, Any] = {
        "model_type": kind,
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": _HEAD not in file.tensors,
    }
    for name, field in _TOKENS.items():
        described[field] = file.values.get(f"tokenizer.ggml.{name}_token_id")
    for key, field in _SIZES.items():
        is_known = hasattr(known, field) or field == "head_dim"
        if key in _REQUIRED or (is_known and _key(file, key) in file.values):
            described[field] = _count(file, key)
    described.setdefault("num_key_value_heads", described["num_attention_heads"])
    if _EMBEDDING in file.tensors:
        described.setdefault("vocab_size", file.tensors[_EMBEDDING].shape[0])
    if hasattr(known, "norm_topk_prob"):
        described["norm_topk_prob"] = ARCHITECTURES[kind].normalizes
    config = made_config(described, file.path)
    rotated, head = file.values.get(_key(file, "rope.dimension_count")), head_size(config)
    if rotated not in (None, head):
        raise ValueError(
            f"{file.path}: {_key(file, 'rope.dimension_count')} is {rotated!r}, but heads have "
            f"{head} elements, and all of them are rotated in a model {kind!r}. Correct one."
        )
    return config


def _mixture(file: GgufFile) -> str | None:
    """Return the model type of mixtures of experts of the architecture of a file, if any."""
    name = file.values.get("general.architecture")
    known = ARCHITECTURES.items()
    return next((k for k, a in known if a.name == name and a.normalizes is not None), None)


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
