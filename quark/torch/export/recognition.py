"""Loading of a checkpoint of any container: quantized or in float, whole or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.digests import check_unchanged
from quark.torch.export.checkpoint.config_json import SECTION, read_config_json
from quark.torch.export.checkpoint.dequantized import FloatReader
from quark.torch.export.checkpoint.float_model import check_float_model, load_float_model
from quark.torch.export.checkpoint.float_source import open_float_model
from quark.torch.export.checkpoint.prequantized import remember_prequantized
from quark.torch.export.checkpoint.reader import Loading, Reader, cast_float_parameters
from quark.torch.export.checkpoint.streamed_model import (
    stream_loading,
    stream_model,
    stream_tensors,
)
from quark.torch.export.checkpoint_contents import Contents
from quark.torch.export.containers.base import Container
from quark.torch.export.containers.recognition import reading as reading
from quark.torch.export.containers.recognition import recognize_container as recognize_container
from quark.torch.export.containers.recognition import recognize_format as recognize_format
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.export.verification import Verdict
from quark.torch.pipeline.memory_limit import free_memory
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.nn.runtime import check_runtime, set_runtime

_WORK = 1.8  # memory that a model in memory and the work on it take, in sizes of its files


def open_checkpoint(source: str | Path, trust_remote_code: bool = False, **options: Any) -> Loading:
    """Return a model that is ready for the tensors of a checkpoint, headers checked.

    Args:
        source: Directory of a checkpoint, or a file, of any container that is read.
        trust_remote_code: Passed to Transformers.
        options: Passed to Transformers where the model is built, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A file is damaged or not understood.
    """
    with reading(Path(source)):
        return recognize_container(source).open(Path(source), trust_remote_code, **options)


def check_checkpoint(
    source: str | Path, trust_remote_code: bool = False, check_digests: bool = False
) -> None:
    """Check that a checkpoint can be loaded as far as its headers tell: no tensor is read.

    Args:
        source: Directory of a checkpoint, or a file.
        trust_remote_code: Whether Python code of the directory may run.
        check_digests: As in ``load_checkpoint``.

    Raises:
        FileNotFoundError: Files, or their digests, are missing.
        ValueError: As in ``load_checkpoint``.
    """
    source = Path(source)
    if check_digests:
        check_unchanged(source)
    container = recognize_container(source)
    with reading(source):
        if container.holds_other_model(source):
            check_float_model(source, trust_remote_code)
        elif not container.has_codes(source):
            container.open_in_float(source, None, trust_remote_code)
        else:
            container.open(source, trust_remote_code)


def open_dequantized(
    source: str | Path,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, FloatReader]:
    """Return the float architecture of a quantized checkpoint, and a reader of its values.

    Args:
        source: Directory of a quantized checkpoint, or a file, of any container that is read.
        dtype: Type of the float parameters; None for the type of the checkpoint.
        trust_remote_code: Passed to Transformers.
        options: Passed to Transformers where the model is built, such as ``attn_implementation``.

    Returns:
        The model, on the meta device, and the reader, under the names of its state.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A file is damaged or not understood, or the checkpoint is not quantized by a
            method of ``FORMATS``.
    """
    source = Path(source)
    with reading(source):
        container = recognize_container(source)
        return container.open_in_float(source, dtype, trust_remote_code, **options)


def open_in_float(
    source: str | Path,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[nn.Module, Reader]:
    """Return a float model without values, and its tensors: those of a quantized one dequantized.

    Args:
        source: Directory of safetensors in float, or a quantized checkpoint of any container.
        dtype: Type of the float parameters; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A file is damaged, or the checkpoint is quantized by an unknown method.
    """
    source = Path(source)
    if not recognize_container(source).is_quantized(source):
        with reading(source):
            return open_float_model(source, trust_remote_code, dtype, **options)
    return open_dequantized(source, _torch_type(dtype), trust_remote_code, **options)


def load_in_float(
    source: str | Path,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    check_digests: bool = False,
    max_memory: int | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> nn.Module:
    """Load a model in float: that of a quantized checkpoint has the dequantized values.

    Args:
        source: Directory of a float or quantized checkpoint, or a file, of any container that is
            read.
        dtype: Type of the float parameters; ``auto`` for the type of the checkpoint.
        trust_remote_code: Whether Python code of the directory may run.
        check_digests: As in ``load_checkpoint``.
        max_memory: As in ``load_checkpoint``.
        device: Device of the parameters.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: Files, or their digests, are missing.
        ValueError: As in ``load_checkpoint``; or a quantized checkpoint is of an unknown method, or
            has a scale that is not finite, or a parameter overflows in ``dtype``. With
            ``max_memory``, the parameters are checked when they are used.
    """
    source = Path(source)
    container = recognize_container(source)
    if not container.is_quantized(source):
        return load_checkpoint(
            source, dtype, trust_remote_code, check_digests, max_memory, device, **options
        )
    if check_digests:
        check_unchanged(source)
    model, reader = open_dequantized(source, _torch_type(dtype), trust_remote_code, **options)
    size = sum(entry.nbytes for entry in reader.entries.values())
    with reading(source):
        if max_memory is not None or exceeds_memory(size, device):
            model = stream_tensors(model, reader, max_memory, device=device, place=source)
        else:
            model = reader.fill(model).to(device)
    remember_prequantized(model, reader)
    return model


def _torch_type(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the type that is asked for; None for the stored one."""
    if dtype == "auto":
        return None
    kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return kind


def read_contents(source: str | Path) -> Contents:
    """Return what a checkpoint holds, quantized or not, from its headers alone.

    Args:
        source: Directory of a checkpoint, or a file, of any container that is read.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A file is damaged, or of a container that is not read.
    """
    return recognize_container(source).contents(Path(source))


def verify(
    path: str | Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
) -> Verdict:
    """Open a checkpoint, a GGUF or an ONNX file and compare its predictions with those of a model.

    Transformers opens checkpoints and GGUF files if the packages that it needs for the format are
    installed. Otherwise, or if it fails, this package reads them, and the verdict says why. ONNX
    Runtime runs ONNX files. A second model is in memory meanwhile.

    Args:
        path: Directory of the checkpoint, or the file. A directory with several containers is
            verified as the first of ``CONTAINERS``.
        model: The model that was exported: a causal language model of Transformers, or any model
            whose graph was exported.
        trust_remote_code: Passed to Transformers.
        inputs: Inputs of an ONNX file, as ``ModelExporter.export_onnx_model`` takes them; by
            default random tokens.

    Raises:
        ImportError: ONNX Runtime is missing.
        FileNotFoundError: There is no checkpoint.
        ValueError: The predictions differ, nothing can open the checkpoint, or the model takes no
            text and there are no ``inputs``.
    """
    check_types(bool, trust_remote_code=trust_remote_code)
    return recognize_container(path).verify(Path(path), model, trust_remote_code, inputs)


def load_checkpoint(
    source: str | Path,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    check_digests: bool = False,
    max_memory: int | None = None,
    device: str | torch.device = "cpu",
    runtime: str = "exact",
    **options: Any,
) -> nn.Module:
    """Load a float or quantized model from the files of any container that is read.

    With ``max_memory``, and where the model takes more memory than the machine has free, tensors
    are read when they are used. Results are the same, bit for bit.

    Args:
        source: Directory of a checkpoint, or a file.
        dtype: Type of the parameters that are not quantized; ``auto`` for the stored one.
        trust_remote_code: Whether Python code of the directory may run.
        check_digests: Whether the files are first compared with the digests that were written with
            them.
        max_memory: Bytes that this process may take, as far as the work on one block allows.
        device: Device of the parameters.
        runtime: How packed layers compute; see ``set_runtime``. A model that is read in parts
            takes ``exact`` alone.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: Files, or their digests, are missing.
        ValueError: A file is damaged or not understood, its tensors do not fit the model, or it
            cannot be read in parts. The message names ``source``. Or ``runtime`` is unknown, or
            does not fit a model that is read in parts.
    """
    check_types(bool, trust_remote_code=trust_remote_code, check_digests=check_digests)
    check_runtime(runtime)
    source = Path(source)
    if check_digests:
        check_unchanged(source)
    container = recognize_container(source)
    if not container.has_codes(source):
        return load_in_float(source, dtype, trust_remote_code, False, max_memory, device, **options)
    streams = max_memory is not None or exceeds_memory(container.size(source), device)
    if streams:
        _check_exact(source, runtime)
    with reading(source):
        if container.holds_other_model(source):
            if streams:
                _check_safetensors(source, container)
                return stream_model(
                    source, max_memory, dtype, trust_remote_code, device=device, **options
                )
            return load_float_model(source, dtype, trust_remote_code, **options).to(device)
        loading = container.open(source, trust_remote_code, **options)
        if streams and dtype == "auto":
            return stream_loading(loading, max_memory, device)
        model = loading.fill().to(device)
    if dtype != "auto":
        to = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        model = cast_float_parameters(model, to)
    return set_runtime(model, runtime)


def exceeds_memory(size: int, device: str | torch.device) -> bool:
    """Whether a model of so many bytes, and the work on it, take more than is free."""
    return size * _WORK > free_memory(device)


def _check_exact(source: Path, runtime: str) -> None:
    """Check that a model that is read in parts is to compute exactly.

    Raises:
        ValueError: It is not.
    """
    if runtime != "exact":
        raise ValueError(
            f"{source} is read in parts, because of max_memory or because memory is too small, and "
            f"computes with runtime=exact alone, got {runtime}: give exact."
        )


def _check_safetensors(source: Path, container: Container) -> None:
    """Check that the tensors of a float model can be read one by one.

    Raises:
        ValueError: They cannot.
    """
    if container.name != SAFETENSORS or not any(source.glob("*.safetensors")):
        raise ValueError(
            f"{source} is too large for this memory, and only safetensors can be read in parts: "
            "convert it, or leave max_memory (--max_memory) out on a larger machine."
        )
    if read_config_json(source).get(SECTION):
        raise ValueError(
            f"{source} is quantized by a method that is not read in parts: leave max_memory "
            "(--max_memory) out."
        )
