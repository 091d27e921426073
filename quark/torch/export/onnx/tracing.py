"""Tracing modules with the ONNX exporter of torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quark.torch.progress import elapsed_progress

# From opset 23 on, torch writes the operator Attention, which no converter takes to later opsets.
LAST_OPSET_WITHOUT_ATTENTION = 22


def trace_module(
    module: nn.Module,
    args: Sequence[torch.Tensor],
    shapes: Sequence[Mapping[int, Any]],
    opset: int,
    input_names: Sequence[str],
    output_names: Sequence[str] = (),
    verbose: bool = False,
) -> Any:
    """Return the ``onnx_ir.Model`` of a module, without optimization.

    Args:
        module: A module whose forward accepts tensors only: ``forward(*tensors)``.
        args: Examples of the tensors.
        shapes: Axes of each tensor that have any size.
        opset: Version of the operators.
        input_names: Names of the inputs.
        output_names: Names of the outputs, [] for the exporter's names.
        verbose: Passed to ``torch.onnx.export``.

    Raises:
        ValueError: The operators cannot be converted to that version.
        torch.onnx.OnnxExporterError: The module cannot be traced.
    """
    # The fused kernels return other strides than the operators that take their place in a graph, so
    # that views of their results (T5, Swin) would not fit.
    with _quiet(), sdpa_kernel([SDPBackend.MATH]), elapsed_progress("tracing the graph"):
        program: Any = torch.onnx.export(
            module,
            tuple(args),
            input_names=list(input_names),
            output_names=list(output_names) or None,
            opset_version=min(opset, LAST_OPSET_WITHOUT_ATTENTION),
            dynamic_shapes=(tuple(shapes),),
            dynamo=True,
            optimize=False,
            verbose=verbose,
        )
        model = program.model
        if opset > LAST_OPSET_WITHOUT_ATTENTION:
            model = _convert(model, opset)
    if model.opset_imports[""] != opset:
        raise ValueError(
            f"torch.onnx.export cannot convert the model to opset_version={opset}: leave it out."
        )
    return model


def _convert(model: Any, opset: int) -> Any:
    """Return an ``onnx_ir.Model`` in a later opset, or in the same one if that cannot be."""
    from onnxscript import version_converter

    version_converter.convert_version(model, opset, fallback=True)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about optional packages and about its own code."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
