"""Model families that can be stored in GGUF, and the names of their tensors there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from quark.torch.export.checkpoint.transformers_names import saved_names
from quark.torch.export.gguf.rope import check_scaling, rope_parameters

TENSOR_SCALE = ".scale"  # ends the name of the tensor scale of a weight
_KINDS = (".weight", ".bias", TENSOR_SCALE)


class Architecture(NamedTuple):
    """How a family of Transformers is stored in GGUF.

    Attributes:
        name: Name of the architecture in GGUF.
        interleaves: Whether the rows of queries and keys are interleaved, because rotary
            embedding rotates neighbours in llama.cpp and halves in Transformers.
        norm_offset: Added to the weights of norms.
        rms: Whether norms are RMSNorm; LayerNorm otherwise.
        tensor_scales: Whether llama.cpp multiplies the products of every layer by its tensor
            scale. It reads the scales of other families too, and leaves out those of their MLPs.
        normalizes: Whether llama.cpp divides the scores of the chosen experts of a token by their
            sum; None for families without experts.
        has_own_head: Whether llama.cpp requires an output head that is not the embedding.
        shares_keys: Whether llama.cpp knows heads of keys that serve several heads of queries.
        has_biases: Whether the attention of a mixture of experts has biases.
        alternates: Whether the rows of gate and up alternate in one matrix of an expert.
        window_period: Number of layers of which the last one attends to everything, and the others
            to a window; None if all layers are alike.
        unrotated_period: Number of layers of which the last one has no rotary embedding; None if
            all layers have it.
    """

    name: str
    interleaves: bool = False
    norm_offset: int = 0
    rms: bool = True
    tensor_scales: bool = False
    normalizes: bool | None = None
    has_own_head: bool = False
    shares_keys: bool = True
    has_biases: bool = False
    alternates: bool = False
    window_period: int | None = None
    unrotated_period: int | None = None


ARCHITECTURES = {  # by model_type
    "llama": Architecture("llama", interleaves=True, tensor_scales=True),
    "mistral": Architecture("llama", interleaves=True, tensor_scales=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", tensor_scales=True),
    "gemma": Architecture("gemma", norm_offset=1),
    "gemma2": Architecture("gemma2", norm_offset=1),
    "gemma3_text": Architecture("gemma3", norm_offset=1),
    "phi": Architecture("phi2", rms=False),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2", has_own_head=True),
    "granite": Architecture("granite", interleaves=True),
    "smollm3": Architecture("smollm3", interleaves=True, unrotated_period=4),
    "mixtral": Architecture("llama", interleaves=True, tensor_scales=True, normalizes=True),
    "qwen2_moe": Architecture("qwen2moe", normalizes=False, has_own_head=True),
    "qwen3_moe": Architecture("qwen3moe", tensor_scales=True, normalizes=True),
    "olmoe": Architecture("olmoe", normalizes=False, has_own_head=True, shares_keys=False),
    "gpt_oss": Architecture(
        "gpt-oss",
        normalizes=True,
        has_own_head=True,
        has_biases=True,
        alternates=True,
        window_period=2,
    ),
}


class UnknownArchitecture(ValueError):
    """GGUF files of a type of model cannot be written, whatever its layers hold."""


def architecture_of(config: Any) -> Architecture:
    """Return how a model is stored.

    Raises:
        UnknownArchitecture: The model type is not supported.
        ValueError: llama.cpp does not compute what the configuration says.
    """
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"GGUF export knows the model types {', '.join(ARCHITECTURES)}, not {kind!r}. Write "
            "safetensors (for vLLM and Transformers) or ONNX instead."
        )
    check_scaling(rope_parameters(config))
    architecture = ARCHITECTURES[kind]
    for field, expected in _computed(config, architecture).items():
        if getattr(config, field, expected) != expected:
            raise ValueError(
                f"The model has {field}={getattr(config, field)!r}, but llama.cpp computes models "
                f"{architecture.name!r} as with {field}={expected!r}. Write safetensors (for vLLM "
                "and Transformers) or ONNX instead."
            )
    return architecture


def _computed(config: Any, architecture: Architecture) -> dict[str, Any]:
    """Return the options of a model that llama.cpp does not read, and the value that it takes."""
    computed: dict[str, Any] = {}
    if architecture.normalizes is not None:
        computed |= {"norm_topk_prob": architecture.normalizes, "hidden_act": "silu"}
        computed |= {"attention_bias": architecture.has_biases, "clip_qkv": None}
        computed |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    if architecture.has_own_head:
        computed["tie_word_embeddings"] = False
    if not architecture.shares_keys:
        computed["num_key_value_heads"] = config.num_attention_heads
    layers = range(1, config.num_hidden_layers + 1)
    if architecture.window_period is not None:
        computed["layer_types"] = [
            "sliding_attention" if number % architecture.window_period else "full_attention"
            for number in layers
        ]
    if architecture.unrotated_period is not None:
        computed["no_rope_layers"] = [
            int(number % architecture.unrotated_period != 0) for number in layers
        ]
    return computed


def head_size(config: Any) -> int:
    """Return the width of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def is_rotated(key: str) -> bool:
    """Whether rotary embedding acts on the outputs of the layer that a tensor belongs to."""
    return key.split(".")[-2] in ("q_proj", "k_proj")


def matrices_of(part: str, architecture: Architecture) -> list[str]:
    """Return the matrices in GGUF whose rows alternate in a linear layer of an expert.

    Example: ``gate_up_proj`` of gpt-oss has the rows of ``gate_proj`` and ``up_proj``.
    """
    *roles, kind = part.split("_")
    return [f"{role}_{kind}" for role in roles] if architecture.alternates else [part]


def tensor_names(
    architecture: Architecture, model: nn.Module, keys: Iterable[str]
) -> dict[str, str]:
    """Return names of tensors in Transformers -> their names in GGUF.

    Args:
        architecture: How the model family is stored.
        model: The model.
        keys: Names of its tensors. Those of experts are without the number of the expert, such as
            ``model.layers.0.mlp.experts.up_proj.weight``.

    Raises:
        ValueError: The architecture does not have a tensor.
    """
    gguf = import_gguf()
    config: Any = model.config
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    owners = {key: key.rpartition(".")[0] for key in keys}
    # Some names in the model are not those of its checkpoints, which the table has.
    saved = dict(zip(owners, saved_names(model, owners.values()), strict=True))
    names = {}
    for key, owner in owners.items():
        given = (key, saved[key] + key.removeprefix(owner))
        found = (table.get_name(k, try_suffixes=_KINDS) for k in given)
        name = next((name for name in found if name is not None), None)
        if name is None:
            raise ValueError(f"GGUF has no place for {key} in a model {architecture.name!r}.")
        # A parameter without a kind in its name, such as the sinks of attention, has one in GGUF.
        names[key] = name if name.endswith(_KINDS) else f"{name}.weight"
    return names


def import_gguf() -> Any:
    """Import the package gguf.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise ImportError("GGUF files need the package gguf: pip install gguf.") from None
    return gguf
