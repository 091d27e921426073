"""Float models larger than memory: their parameters are read from the files when they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.computed_buffers import check_buffers, compute_buffers
from quark.torch.export.checkpoint.float_source import (
    FloatSource,
    fill_with_placeholders,
    open_float_model,
)
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch


def stream_model(
    directory: str | Path,
    limit: int,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    scratch: Scratch | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> nn.Module:
    """Return a float model whose parameters are read from safetensors when they are used.

    Args:
        directory: Directory of the model.
        limit: Bytes of parameters in memory, apart from those that are in use.
        dtype: Type of the parameters; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        scratch: Files for values that are changed; None for temporary ones.
        device: Where parameters are brought to.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: As in ``load_float_model``.
    """
    model, files = open_float_model(Path(directory), trust_remote_code, dtype, **options)
    check_buffers(model)
    fill_with_placeholders(model)
    source = FloatSource(model, files)
    _read_buffers(model, source, torch.device(device))
    compute_buffers(model, torch.device(device))
    Residency(model, source, limit, scratch or Scratch(), device)
    return model.eval()


def _read_buffers(model: nn.Module, source: FloatSource, device: torch.device) -> None:
    """Read the buffers that files hold; they are small and stay in memory."""
    state = model.state_dict()
    names = [name for name, _ in model.named_buffers() if name in state]
    for name, values in source.read(names).items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = values.to(device)
