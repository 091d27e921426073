"""The model of a run, loaded by its flags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli import console, models
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn


def load(request: Request, source: Path, device: str, in_float: bool = False) -> nn.Module:
    """Load a float or quantized model by the flags of a request, in parts under a bound."""
    with console.stage("loading the model", spinner=True):
        return models.load_model(
            source,
            request.data_type,
            device,
            request.trust_remote_code,
            request.model_attn_implementation,
            request.max_memory,
            in_float,
        )


def load_params(request: Request, device: str) -> nn.Module:
    """Load a model that ``--params_save`` has written."""
    from quark.torch.export.checkpoint.architecture import empty_model, read_config
    from quark.torch.export.checkpoint.files import CheckpointReader
    from quark.torch.export.params import load_params as read_params

    assert request.json_path is not None
    assert request.safetensors_path is not None
    tensors, remote = request.safetensors_path, request.trust_remote_code
    with console.stage("loading the model", spinner=True):
        model = empty_model(
            read_config(request.model_dir, remote),
            CheckpointReader(tensors.parent, tensors.name).entries,
            request.model_dir,
            trust_remote_code=remote,
            attn_implementation=request.model_attn_implementation,
        )
        model = read_params(model, request.json_path, tensors)
    return model.to(device).eval()
