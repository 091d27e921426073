"""The source of a run as its headers tell it: the model without values, files and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.export.checkpoint.reader import Reader


def open_source(request: Request) -> tuple[nn.Module, Reader]:
    """Return the float model of a request without values, and its tensors."""
    import torch

    from quark.torch.export.gguf.float_reader import open_gguf_in_float
    from quark.torch.export.recognition import open_in_float

    source, data_type = request.model_dir, request.data_type
    if not source.is_file():
        return open_in_float(source, data_type, request.trust_remote_code)
    return open_gguf_in_float(source, None if data_type == "auto" else getattr(torch, data_type))


def converted_bytes(model: nn.Module, files: Reader) -> int:
    """Return the bytes of the tensors that are made of several of the files."""
    from quark.torch.export.checkpoint.header_checks import tied_names
    from quark.torch.files import size_of

    tied = tied_names(model)
    made = {n: t for n, t in model.state_dict().items() if n not in files.entries and n not in tied}
    return size_of(made)


def source_files(request: Request) -> list[Path]:
    """Return the files of the source that hold tensors."""
    source = request.model_dir
    return [source] if source.is_file() else sorted(source.glob("*.safetensors"))


def stored_bytes(request: Request) -> int:
    """Return the bytes of the tensors in the files of a request."""
    from quark.cli.models import read_entries

    if request.model_dir.is_file():
        return request.model_dir.stat().st_size
    return sum(entry.nbytes for entry in read_entries(request.model_dir).values())
