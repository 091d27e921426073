"""Rotary position embedding in GGUF: the order of rows, and the scaling of frequencies."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import nn

from quark.torch.export.gguf.reader import GgufFile

FACTORS = "rope_freqs.weight"  # tensor by which frequencies are divided
SCALINGS = ("default", "linear", "llama3", "yarn")
_YARN = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
_YARN |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # may be left out
_INFERRED = ("attention_factor", "mscale", "mscale_all_dim")  # llama.cpp computes the first
DEFAULT_THETA = 10000.0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the parameters of rotary embedding, those of full attention if there are several."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    return dict(parameters.get("full_attention", parameters))


def check_scaling(rope: dict[str, Any]) -> None:
    """Check that llama.cpp knows the scaling of rotary embedding.

    Args:
        rope: Result of ``rope_parameters``.

    Raises:
        ValueError: It does not.
    """
    scaling = rope.get("rope_type", "default")
    if scaling not in SCALINGS:
        raise ValueError(
            f"GGUF export knows rotary embedding scaled by {', '.join(SCALINGS)}, not {scaling!r}."
        )
    given = [name for name in _INFERRED if scaling == "yarn" and rope.get(name) is not None]
    if given:
        raise ValueError(
            f"GGUF export knows rotary embedding scaled by yarn without {', '.join(given)}, which "
            "the model has. Write safetensors (for vLLM and Transformers) or ONNX instead."
        )


def add_scaling(writer: Any, rope: dict[str, Any], architecture: str) -> None:
    """Add the scaling of rotary embedding to the header, unless it is a tensor of factors.

    Args:
        writer: A GGUFWriter.
        rope: Result of ``rope_parameters``.
        architecture: Name of the architecture in GGUF.
    """
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return
    writer.add_string(f"{architecture}.rope.scaling.type", kind)
    writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, field in _YARN.items():
            if key.startswith("yarn_") and rope.get(field) is not None:
                writer.add_float32(f"{architecture}.rope.scaling.{key}", float(rope[field]))


def interleaved_rows(rows: int, head: int) -> torch.Tensor:
    """Return the row of a query or key weight that comes i-th in GGUF: (rows,) indices.

    Transformers rotates element i of a head with element i + head / 2, llama.cpp rotates
    neighbours. So the halves of each head are interleaved: for heads of 6 rows, the rows
    0 1 2 3 4 5 are written in the order 0 3 1 4 2 5.
    """
    return torch.arange(rows, device="cpu").reshape(-1, 2, head // 2).transpose(1, 2).flatten()


def frequency_factors(model: nn.Module, config: Any, head: int) -> torch.Tensor | None:
    """Return the divisor of each frequency, (head / 2,), where scaling differs between them.

    Args:
        model: A model with a buffer ``rotary_emb.inv_freq``.
        config: Its configuration in Transformers.
        head: Width of an attention head.
    """
    rope = rope_parameters(config)
    if rope.get("rope_type") != "llama3":
        return None
    base = float(rope["rope_theta"])
    unscaled = base ** -(torch.arange(0, head, 2, dtype=torch.float32, device="cpu") / head)
    scaled = next(b for n, b in model.named_buffers() if n.endswith("rotary_emb.inv_freq"))
    return unscaled / scaled.cpu().float()


def is_scaled(file: GgufFile) -> bool:
    """Whether a file scales rotary embedding, which Transformers leaves out when it reads it."""
    kind = file.values.get(f"{file.values.get('general.architecture')}.rope.scaling.type", "none")
    return kind != "none" or FACTORS in file.tensors


def read_scaling(config: Any, file: GgufFile, architecture: str) -> None:
    """Set the scaling of rotary embedding in ``config``, which Transformers does not read.

    Args:
        config: Configuration in Transformers. It is changed.
        file: The file that it was read from.
        architecture: Name of the architecture in GGUF.

    Raises:
        ValueError: The scaling is not supported.
    """
    kind = file.values.get(f"{architecture}.rope.scaling.type", "none")
    rope = {"rope_theta": DEFAULT_THETA, **rope_parameters(config)}
    if kind == "linear":
        factor = float(file.values.get(f"{architecture}.rope.scaling.factor", 1.0))
        config.rope_parameters = {**rope, "rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        config.rope_parameters = {**rope, **_read_yarn(file, architecture)}
        # Whether the range of the ramp is rounded: no file tells it, the type of model does.
        usual = rope_parameters(type(config)()).get("truncate")
        config.rope_parameters |= {} if usual is None else {"truncate": usual}
    elif kind != "none":
        raise ValueError(f"{file.path}: rotary embedding scaled by {kind!r} is not supported.")
    if FACTORS in file.tensors:
        config.rope_parameters = {
            **rope,
            **_LLAMA3,
            "rope_type": "llama3",
            "factor": float(_stored_factors(file).max()),
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }


def _read_yarn(file: GgufFile, architecture: str) -> dict[str, Any]:
    """Return the parameters of rotary embedding scaled by yarn."""
    keys = {field: f"{architecture}.rope.scaling.{key}" for key, field in _YARN.items()}
    rope = {field: file.values[key] for field, key in keys.items() if key in file.values}
    needed = ("factor", "original_max_position_embeddings")
    wrong = [field for field, value in rope.items() if type(value) not in (int, float)]
    wrong += [f for f, value in rope.items() if f not in wrong and not 0 < value < inf]
    wrong += [field for field in needed if field not in rope]
    if wrong:
        raise ValueError(
            f"{file.path}: {keys[wrong[0]]} is {rope.get(wrong[0])!r}, expected a positive number: "
            "the file is damaged. Write it again."
        )
    return {"rope_type": "yarn", **rope}


def check_factors(model: nn.Module, config: Any, file: GgufFile, head: int) -> None:
    """Check that stored factors of frequencies are those of Llama 3.

    Args:
        model: The model on the meta device.
        config: Its configuration in Transformers, after ``read_scaling``.
        file: The file.
        head: Width of an attention head.

    Raises:
        ValueError: The factors differ, or the model has no rotary embedding.
    """
    if FACTORS not in file.tensors:
        return
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb")), None)
    if rotary is None:
        raise ValueError(f"{file.path}: {FACTORS}, but the model has no rotary embedding.")
    holder = nn.Module()
    holder.rotary_emb = type(rotary)(config)  # computes inv_freq on the CPU, not on meta
    expected, stored = frequency_factors(holder, config, head), _stored_factors(file)
    if expected is None or expected.shape != stored.shape or not expected.allclose(stored):
        raise ValueError(f"{file.path}: {FACTORS} are not those of Llama 3: not supported.")


def _stored_factors(file: GgufFile) -> torch.Tensor:
    tensor = file.tensors[FACTORS]
    if tensor.kind != "F32":
        raise ValueError(f"{file.path}: {FACTORS} is {tensor.kind}, expected F32.")
    return file.blocks(FACTORS).clone().view(torch.float32).flatten()
