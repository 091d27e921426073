"""Rotary position embedding in GGUF: the order of rows, and the scaling of frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.export.gguf.reader import GgufFile

FACTORS = "rope_freqs.weight"  # tensor by which frequencies are divided
SCALINGS = ("default", "linear", "llama3")
DEFAULT_THETA = 10000.0
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_CONTEXT = 8192


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the parameters of rotary embedding, those of full attention if there are several."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    return dict(parameters.get("full_attention", parameters))


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
