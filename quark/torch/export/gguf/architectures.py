"""Model families that can be stored in GGUF, and the names of their tensors there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quark.torch.export.gguf.rope import SCALINGS, rope_parameters

TENSOR_SCALE = ".scale"  # ends the name of the tensor scale of a weight


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
    """

    name: str
    interleaves: bool = False
    norm_offset: int = 0
    rms: bool = True
    tensor_scales: bool = False


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
}


class UnknownArchitecture(ValueError):
    """GGUF files of a type of model cannot be written, whatever its layers hold."""


def architecture_of(config: Any) -> Architecture:
    """Return how a model is stored.

    Raises:
        UnknownArchitecture: The model type is not supported.
        ValueError: The scaling of its rotary embedding is not supported.
    """
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"GGUF export knows the model types {', '.join(ARCHITECTURES)}, not {kind!r}. Write "
            "safetensors (for vLLM and Transformers) or ONNX instead."
        )
    scaling = rope_parameters(config).get("rope_type", "default")
    if scaling not in SCALINGS:
        raise ValueError(
            f"GGUF export knows rotary embedding scaled by {', '.join(SCALINGS)}, not {scaling!r}."
        )
    return ARCHITECTURES[kind]


def head_size(config: Any) -> int:
    """Return the width of an attention head."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def is_rotated(key: str) -> bool:
    """Whether rotary embedding acts on the outputs of the layer that a tensor belongs to."""
    return key.split(".")[-2] in ("q_proj", "k_proj")


def tensor_names(architecture: Architecture, config: Any) -> Callable[[str], str]:
    """Return the function from a tensor's name in Transformers to its name in GGUF.

    The function raises ValueError for a tensor that the architecture does not have.
    """
    gguf = import_gguf()
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)

    def gguf_name(key: str) -> str:
        name: str | None = table.get_name(key, try_suffixes=(".weight", ".bias", TENSOR_SCALE))
        if name is None:
            raise ValueError(f"GGUF has no place for {key} in a model {architecture.name!r}.")
        return name

    return gguf_name


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
