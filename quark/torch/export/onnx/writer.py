"""Models in one ONNX file, for ONNX Runtime and what else reads it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.files import check_vacant, fresh_directory
from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.checks import report_experts
from quark.torch.export.formats.layouts.act_order import PROBLEM, has_order
from quark.torch.export.onnx.dequantize_linear import HOLDS, NARROW_IR, NARROW_OPSET, weight_problem
from quark.torch.export.onnx.experts import trace_experts
from quark.torch.export.onnx.functions import Functions, activation_problem
from quark.torch.export.onnx.inputs import Call, Entry
from quark.torch.export.onnx.layers import OnnxLayer
from quark.torch.export.onnx.placeholders import place_weights
from quark.torch.export.onnx.tracing import traced
from quark.torch.graph.eval_mode import at_inference
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.nn.layer import PARAMETERS, QUANTIZERS, QuantMixin
from quark.torch.quantization.nn.packed import PackedMixin

logger = logging.getLogger(__name__)

FILE = "quark_model.onnx"
DEFAULT_OPSET = 20
OLDEST_OPSET = 18  # that torch converts to
LARGEST_FILE = 2_000_000_000  # bytes: a message of protobuf ends at 2^31
_LAYERS = (QuantMixin, PackedMixin)
Judge = Callable[[Path, nn.Module, Any], None]


@dataclass(frozen=True)
class OnnxOptions:
    """How an ONNX file is written; see ``ModelExporter.export_onnx_model``."""

    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    verbose: bool = False
    opset_version: int | None = None
    do_constant_folding: bool = True
    dynamic_shapes: Mapping[str, Any] | None = None
    matmul_nbits: bool = False
    max_file_size: int = LARGEST_FILE


def write_onnx(
    model: nn.Module,
    directory: Path,
    input_args: Any,
    options: OnnxOptions,
    overwrite: bool,
    judge: Judge,
) -> None:
    """Write ``quark_model.onnx``; see ``ModelExporter.export_onnx_model``.

    ``judge`` sees the directory, the model and its inputs before the directory takes its place.
    """
    _check_packages()
    check_vacant(directory, overwrite)
    check_exportable(model)
    check_present(model)
    _check_layers(model)
    call = Call.of(model, input_args)
    shapes = call.shapes(options.dynamic_shapes)
    report_experts(model)
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        logger.warning(
            "The model is in bfloat16, in which ONNX Runtime computes nothing on a CPU: load it in "
            "float32 or float16 for that."
        )
    with at_inference(model):
        named, returned = call.run(model)
        _check_names("input_names", options.input_names, len(call.inputs))
        _check_names("output_names", options.output_names, len(returned))
        outputs = list(options.output_names) or named
        functions = Functions()
        entry = Entry(_twin(model, options.matmul_nbits, functions), call).eval()
        opset = _opset(entry.model, options.opset_version)
        graph = _graph(entry, call, shapes, outputs, opset, options)
        functions.define(graph, opset, options.do_constant_folding)
    placed = place_weights(graph, entry)
    if options.do_constant_folding:
        _fold(graph, placed)
    _finish(graph)
    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    external = f"{FILE}.data" if size > options.max_file_size else None
    with fresh_directory(directory, overwrite, size) as partial:
        _save(graph, partial / FILE, external)
        judge(partial, model, input_args)


def _graph(
    entry: Entry,
    call: Call,
    shapes: list[Mapping[int, str]],
    outputs: list[str],
    opset: int,
    options: OnnxOptions,
) -> Any:
    """Return the graph of a model as the exporter of torch makes it.

    Raises:
        ValueError: The model cannot be traced.
    """
    inputs = list(options.input_names) or list(call.inputs)
    args = call.repeated(shapes)
    try:
        return traced(entry, args, shapes, opset, inputs, outputs, options.verbose)
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip()
        raise ValueError(
            f"torch.onnx.export cannot trace {type(entry.model).__name__}: {cause}\nIf an axis has "
            "to keep its size, leave it out of dynamic_shapes; {} keeps those of input_args."
        ) from error


def _check_packages() -> None:
    try:
        import onnxscript  # noqa: F401 - torch exports with it
        import torch.onnx.ops  # noqa: F401
    except ImportError:
        raise ImportError(
            "ONNX export needs torch 2.8 or later and the package onnxscript: pip install "
            "'quark[onnx]' or pip install onnxscript."
        ) from None


def _check_names(option: str, names: Sequence[str], count: int) -> None:
    """Raise unless all inputs or outputs have a name of their own, or none has one.

    Raises:
        ValueError: They do not.
    """
    if names and (len(names) != count or len({*names}) != count):
        raise ValueError(
            f"{option}={list(names)} are not {count} different names, which the model needs: give "
            "one for each, or leave it out."
        )


def check_config(config: QuantizationConfig, where: str) -> None:
    """Raise if a layer is to be quantized in a way that no graph computes.

    Args:
        config: How it is quantized.
        where: What is quantized so, for the message.

    Raises:
        ValueError: It is.
    """
    for tensor in QUANTIZERS:
        spec = getattr(config, tensor)
        find = weight_problem if tensor in PARAMETERS else activation_problem
        problem = None if spec is None else find(spec)
        if problem:
            raise ValueError(
                f"ONNX cannot hold {where}: for its {tensor} it {problem}. It holds {HOLDS}. "
                "Exclude the layer or quantize it otherwise."
            )


def _check_layers(model: nn.Module) -> None:
    """Raise if a layer is quantized in a way that no graph computes.

    Raises:
        ValueError: One is.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _LAYERS):
            continue
        if has_order(layer):
            raise ValueError(f"ONNX cannot hold {name}: {PROBLEM}. Quantize the float model again.")
        check_config(layer.quant_config, name)


def _twin(model: nn.Module, matmul_nbits: bool, functions: Functions) -> nn.Module:
    """Return a model with the same tensors whose quantized layers can be traced."""
    tensors = [*model.parameters(), *model.buffers()]
    twin: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    trace_experts(twin)
    made: dict[nn.Module, OnnxLayer] = {}
    for name, layer in list(twin.named_modules(remove_duplicate=False)):
        if isinstance(layer, _LAYERS):
            made.setdefault(layer, OnnxLayer(layer, matmul_nbits, functions))
            if not name:
                return made[layer]
            twin.set_submodule(name, made[layer])
    return twin


def _opset(twin: nn.Module, wanted: int | None) -> int:
    """Return the opset to write.

    Raises:
        ValueError: The one that is wanted lacks a type.
    """
    layers = {name: m.opset for name, m in twin.named_modules() if isinstance(m, OnnxLayer)}
    name = max(layers, key=lambda n: layers[n])
    least = max(OLDEST_OPSET, layers[name])
    if wanted is not None and wanted < least:
        raise ValueError(
            f"opset_version={wanted} cannot hold {name}: give {least} or more, or leave it out."
        )
    return wanted or max(DEFAULT_OPSET, least)


def _fold(model: Any, kept: set[Any]) -> None:
    """Fold constants, but not the nodes in ``kept``, so that codes stay codes."""
    from onnxscript import optimizer

    optimizer.fold_constants(model, should_fold=lambda node: False if node in kept else None)
    optimizer.remove_unused_nodes(model)


def _finish(model: Any) -> None:
    """Give tensors the names of the model, and the file a version that has all types.

    What the exporter notes of the source code of the model is left out.
    """
    nodes = [*model.graph, *(node for function in model.functions.values() for node in function)]
    for part in (*nodes, *model.graph.inputs, *model.graph.outputs, model.graph):
        part.metadata_props.clear()
    for value in list(model.graph.initializers.values()):
        value.metadata_props.clear()
        value.name = value.name.removeprefix("model.")
    model.producer_name, model.producer_version = "quark", __version__
    if model.opset_imports[""] >= NARROW_OPSET:
        model.ir_version = max(model.ir_version, NARROW_IR)


def _save(model: Any, path: Path, external: str | None) -> None:
    import onnx_ir as ir

    ir.save(model, path, external_data=external)
