"""Writing of a whole directory of safetensors: tensors, configuration, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.export.checkpoint.streamed_writer import StreamedState
from quark.torch.export.checkpoint.writer import collect, write_model_files
from quark.torch.export.checks import check_written
from quark.torch.export.formats.base import ExportFormat
from quark.torch.files import Target, size_of
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.batches import show_progress


def write_directory(
    model: nn.Module,
    fmt: ExportFormat,
    target: Target,
    max_shard_size: str | int,
    file_name: str,
    tokenizer: Any | None,
) -> None:
    """Write config.json, *.safetensors and the tokenizer of a frozen model, in memory or in parts.

    Args:
        model: The model.
        fmt: Its format.
        target: Called with the number of bytes that will be written; gives the directory.
        max_shard_size: Size above which tensors are split into several files.
        file_name: Name of the file of tensors, or the first part of several names, without its
            suffix.
        tokenizer: Tokenizer to write, or None.

    Raises:
        OSError: The disk is too full, or a tensor was not written unchanged.
        ValueError: The model cannot be held.
    """
    if residency_of(model) is None:
        tensors = collect(model, fmt)
        values: Iterable[tuple[str, torch.Tensor]] = tensors.items()
    else:
        state = StreamedState(model, fmt)
        tensors, values = state.outline, state.tensors()
    with target(size_of(tensors)) as directory:
        metadata = fmt.file_metadata(tensors)
        writer = ShardWriter(directory, tensors, max_shard_size, file_name, metadata)
        for name, tensor in show_progress(values, "writing"):
            writer.add(name, tensor)
        writer.finish()
        write_model_files(model, fmt.config_section(), directory, tokenizer)
        check_written(tensors, CheckpointReader(directory))
