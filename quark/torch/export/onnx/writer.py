"""Writing a model to one ONNX file, for ONNX Runtime and other software that reads ONNX."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.writer import check_exportable, check_present
from quark.torch.export.expert_tokens import report_experts
from quark.torch.export.formats.layouts.act_order import ACT_ORDER_PROBLEM, has_act_order
from quark.torch.export.onnx.activations import ActivationQuantizer, activation_problem
from quark.torch.export.onnx.dequantize_linear import (
    NARROW_IR,
    NARROW_OPSET,
    PACKED_IR,
    PACKED_OPSET,
    SUPPORTED,
    bias_problem,
    weight_problem,
)
from quark.torch.export.onnx.edges import check_edges, input_scales, replace_edges
from quark.torch.export.onnx.experts import make_experts_traceable
from quark.torch.export.onnx.functions import FunctionTable
from quark.torch.export.onnx.inputs import ModelInputs, PositionalModel
from quark.torch.export.onnx.layers import OnnxLayer
from quark.torch.export.onnx.names import set_names
from quark.torch.export.onnx.placeholders import replace_placeholders
from quark.torch.export.onnx.tracing import trace_module
from quark.torch.files import Target
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.export import ONNX_FILE
from quark.torch.quantization.config.value_types import check_options
from quark.torch.quantization.graph_mode.passes.graph_edits import deep_copy
from quark.torch.quantization.nn.attention import PROBABILITIES
from quark.torch.quantization.nn.fake_quantized import QUANTIZERS
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.probabilities import probability_quantizers

logger = logging.getLogger(__name__)

DEFAULT_OPSET = 20
OLDEST_OPSET = 18  # the oldest that torch can convert to
_MAX_MESSAGE = 1 << 31  # bytes of a message of protobuf, which an ONNX file is
MAX_FILE_SIZE = 2_000_000_000  # leaves room for the graph


@dataclass(frozen=True)
class OnnxOptions:
    """Options of ``ModelExporter.export_onnx_model``, which documents them."""

    input_names: Sequence[str] = ()
    output_names: Sequence[str] = ()
    verbose: bool = False
    opset_version: int | None = None
    do_constant_folding: bool = True
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None
    matmul_nbits: bool = False
    max_file_size: int = MAX_FILE_SIZE
    use_cache: bool = False

    def __post_init__(self) -> None:
        check_options(self, path="")  # fields are arguments of the method
        if not 0 <= self.max_file_size < _MAX_MESSAGE:
            raise ValueError(
                f"max_file_size={self.max_file_size}: expected a number of bytes from 0 (weights "
                f"in a file of their own) to {_MAX_MESSAGE - 1}, which an ONNX file can have."
            )


def write_onnx(
    model: nn.Module,
    target: Target,
    input_args: Any,
    options: OnnxOptions,
    tokenizer: Any | None = None,
) -> None:
    """Write ``quark_model.onnx``, and the files of a tokenizer beside it.

    ``target`` is called with the number of bytes and gives the directory to write to. The other
    arguments and the errors are those of ``ModelExporter.export_onnx_model``.
    """
    check_packages()
    check_writable(model)
    check_present(model)
    with eval_mode(model):
        inputs = ModelInputs.bind(model, input_args, options.use_cache)
    report_experts(model)
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        logger.warning(
            "The model is in bfloat16, in which ONNX Runtime computes nothing on a CPU: load it in "
            "float32 or float16 (--data_type) for that."
        )
    with eval_mode(model):
        axes = inputs.dynamic_axes(model, options.dynamic_shapes)
        names, outputs = inputs.run(model)
        _check_names("input_names", options.input_names, len(inputs.tensors))
        _check_names("output_names", options.output_names, len(outputs))
        output_names = list(options.output_names) or names
        functions = FunctionTable()
        copied = _traceable_copy(model, options.matmul_nbits, functions)
        traceable = PositionalModel(copied, inputs).eval()
        opset = _choose_opset(copied, options.opset_version)
        graph = _trace(traceable, inputs, axes, output_names, opset, options)
        functions.define(graph, opset)
    new_nodes = replace_placeholders(graph, traceable, opset)
    if options.do_constant_folding:
        _fold_constants(graph, new_nodes)
    set_names(graph, options.output_names)
    _set_versions(graph)
    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    external = f"{ONNX_FILE}.data" if size > options.max_file_size else None
    with target(size) as directory:
        _save(graph, directory / ONNX_FILE, external)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


def _trace(
    model: PositionalModel,
    inputs: ModelInputs,
    axes: list[Mapping[int, str]],
    output_names: list[str],
    opset: int,
    options: OnnxOptions,
) -> Any:
    """Return the graph (``onnx_ir.Model``) of a model from the exporter of torch.

    Raises:
        ValueError: The model cannot be traced.
    """
    names = list(options.input_names) or list(inputs.tensors)
    args = inputs.trace_examples(axes)
    try:
        return trace_module(model, args, axes, opset, names, output_names, options.verbose)
    except torch.onnx.OnnxExporterError as error:
        cause = str(error.__cause__ or error).strip()
        raise ValueError(
            f"torch.onnx.export cannot trace {type(model.model).__name__}: {cause}\nIf an axis has "
            "to keep its size, leave it out of dynamic_shapes; {} keeps those of input_args."
        ) from error


def check_packages() -> None:
    """Check that torch and onnxscript can export graphs.

    Raises:
        ImportError: One is missing, or too old.
    """
    try:
        import onnxscript  # noqa: F401 - the exporter of torch needs it
        import torch.onnx.ops  # noqa: F401
    except ImportError:
        raise ImportError(
            "ONNX export needs torch 2.8 or later and the package onnxscript: pip install "
            "onnxscript."
        ) from None


def _check_names(option: str, names: Sequence[str], count: int) -> None:
    """Check that names are given for all inputs or outputs, without duplicates, or for none.

    Raises:
        ValueError: They are not.
    """
    if names and (len(names) != count or len({*names}) != count):
        raise ValueError(
            f"{option}={list(names)} are not {count} different names, which the model needs: give "
            "one for each, or leave it out."
        )


def check_config(config: QuantizationConfig, where: str) -> None:
    """Check that a graph can hold layers with this configuration.

    Args:
        config: Configuration of a layer.
        where: Name of the layer or of the scheme, for the message.

    Raises:
        ValueError: It cannot.
    """
    problems = {"weight": weight_problem, "bias": bias_problem}
    for tensor in QUANTIZERS:
        spec = getattr(config, tensor)
        problem = None if spec is None else problems.get(tensor, activation_problem)(spec)
        if problem:
            raise ValueError(
                f"ONNX cannot hold {where}: for its {tensor} it {problem}. It holds {SUPPORTED}. "
                "Exclude the layer or quantize it otherwise."
            )


def check_writable(model: nn.Module) -> None:
    """Check that a graph can hold every quantized layer.

    Raises:
        ValueError: The model is not quantized or not frozen, or it cannot.
    """
    check_exportable(model)
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedLayer):
            continue
        if has_act_order(layer):
            raise ValueError(
                f"ONNX cannot hold {name}: {ACT_ORDER_PROBLEM}. Quantize the float model again."
            )
        check_config(layer.quant_config, name)
    check_edges(model)
    for name, quantizer in probability_quantizers(model):
        problem = activation_problem(quantizer.spec)
        if problem:
            raise ValueError(
                f"ONNX cannot hold the probabilities of {name}: it {problem}. Quantize without "
                "softmax_quant_spec."
            )


def _traceable_copy(model: nn.Module, matmul_nbits: bool, functions: FunctionTable) -> nn.Module:
    """Return a copy of a model, with the same tensors, whose quantized layers can be traced."""
    tensors = [*model.parameters(), *model.buffers()]
    copied = deep_copy(model, tensors)
    make_experts_traceable(copied)
    layers: dict[nn.Module, OnnxLayer] = {}
    scales = input_scales(copied)
    for name, layer in list(copied.named_modules(remove_duplicate=False)):
        if isinstance(layer, QuantizedLayer):
            made = OnnxLayer(layer, matmul_nbits, functions, scales.get(layer, ()))
            layers.setdefault(layer, made)
            if not name:
                return layers[layer]
            copied.set_submodule(name, layers[layer])
    replace_edges(copied, functions)
    for name, quantizer in list(probability_quantizers(copied)):
        probabilities = ActivationQuantizer(quantizer.quantized_tensor(None, True), True, functions)
        copied.set_submodule(f"{name}.{PROBABILITIES}", probabilities)
    return copied


def _choose_opset(model: nn.Module, requested: int | None) -> int:
    """Return the requested opset, or the default if that has all types and operators.

    Raises:
        ValueError: The requested opset lacks a type or an operator.
    """
    kinds = (OnnxLayer, ActivationQuantizer)
    layers = {name: m.opset for name, m in model.named_modules() if isinstance(m, kinds)}
    name = max(layers, key=lambda n: layers[n])
    least = max(OLDEST_OPSET, layers[name])
    if requested is not None and requested < least:
        raise ValueError(
            f"opset_version={requested} cannot hold {name}: give {least} or more, or leave it out."
        )
    return requested or max(DEFAULT_OPSET, least)


def _fold_constants(model: Any, kept: set[Any]) -> None:
    """Fold constants except the nodes in ``kept``: folding those would dequantize the weights."""
    from onnxscript import optimizer

    optimizer.fold_constants(model, should_fold=lambda node: False if node in kept else None)
    optimizer.remove_unused_nodes(model)


def _set_versions(model: Any) -> None:
    """Set the IR version and the producer, and remove metadata of the source code."""
    nodes = [*model.graph, *(node for function in model.functions.values() for node in function)]
    for part in (*nodes, *model.graph.inputs, *model.graph.outputs, model.graph):
        part.metadata_props.clear()
    for value in list(model.graph.initializers.values()):
        value.metadata_props.clear()
    model.producer_name, model.producer_version = "quark", __version__
    for opset, least in ((NARROW_OPSET, NARROW_IR), (PACKED_OPSET, PACKED_IR)):
        if model.opset_imports[""] >= opset:
            model.ir_version = max(model.ir_version, least)


def _save(model: Any, path: Path, external: str | None) -> None:
    import onnx_ir as ir

    ir.save(model, path, external_data=external)
