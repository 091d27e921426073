"""Quantized graphs as archives of ``torch.export``, which torch opens without this package."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from quark.torch.export.archive_check import checked_archive
from quark.torch.export.checkpoint.value_checks import check_graph_values
from quark.torch.graph.trace import iter_tensors
from quark.torch.numerics.custom_operators import register_custom_operators
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.graph_mode.edges import MovedQuantizer
from quark.torch.quantization.graph_mode.inputs import check_arguments
from quark.torch.quantization.graph_mode.passes.graph_edits import deep_copy
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer

logger = logging.getLogger(__name__)


class _PlainQuantizer(nn.Module):
    """Quantizes as a ``TensorQuantizer`` of integers does, by arithmetic of torch."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        super().__init__()
        fmt, zeros = quantizer.scheme.fmt, quantizer.zero_point
        assert quantizer.scale is not None
        self._scale = float(quantizer.scale)
        self._inverse = float(quantizer.scale.float().reciprocal())
        zero_point = 0 if zeros is None else int(zeros)
        self._range = fmt.qmin - zero_point, fmt.qmax - zero_point

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize ``x``."""
        codes = (x.float() * self._inverse).round().clamp(*self._range)
        return (codes * self._scale).to(x.dtype)


def graph_archive(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> bytes:
    """Return a frozen graph as an archive of ``torch.export.save``.

    Axes of any size stay so. Integers with one static scale are quantized by operators of torch, so
    the archive runs without this package. Other formats need its custom operators.

    Args:
        model: A frozen graph. It is not changed.
        args: Example of the arguments.
        kwargs: Example of keyword arguments.

    Raises:
        TypeError: The model is no graph.
        ValueError: It is not quantized or not frozen, or does not take the arguments.
    """
    graph = check_frozen_graph(model)
    check_arguments(graph, args, kwargs)
    kwargs, plain = kwargs or {}, _with_plain_quantizers(graph)
    with torch.no_grad():
        outputs = [list(iter_tensors(g(*args, **kwargs))) for g in (graph, plain)]
    is_same = all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))
    if not is_same:
        logger.warning("Operators of torch round otherwise here: the archive needs this package.")
    shapes = dynamic_shapes(graph, kwargs)
    used = plain if is_same else graph
    program = torch.export.export(used, args, kwargs, dynamic_shapes=shapes)
    remove_source_lines(program)
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


def check_frozen_graph(model: nn.Module) -> fx.GraphModule:
    """Check that a model is a frozen graph, and return it.

    Raises:
        TypeError: It is no graph.
        ValueError: It is not quantized or not frozen.
    """
    if not isinstance(model, fx.GraphModule):
        raise TypeError(f"model: expected a quantized graph, got a {type(model).__name__}.")
    layers = graph_layers(model)
    if not layers or not all(layer.frozen for layer in layers.values()):
        raise ValueError("The graph is not frozen: call ModelQuantizer.freeze(model.eval()) first.")
    return model


def graph_layers(graph: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a graph by name: fake-quantized, or packed as loaded."""
    return {n: m for n, m in graph.named_modules() if isinstance(m, QuantizedLayer)}


def remove_source_lines(program: torch.export.ExportedProgram) -> None:
    """Remove the lines of code that the nodes come from, with the paths of their files."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)


def load_graph_archive(path: str | Path) -> fx.GraphModule:
    """Return the graph of an archive of ``torch.export.save``.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: It is no such archive, has contents that could run code, or a weight or a scale
            is NaN or infinite.
    """
    register_custom_operators()
    content = checked_archive(path)
    try:
        graph = torch.export.load(content).module()
    except Exception as error:  # whatever a damaged archive raises
        raise ValueError(
            f"{path}: torch {torch.__version__} cannot open the archive: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        check_graph_values(graph)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name in ("train", "eval"):
        vars(graph).pop(name, None)  # an exported graph refuses to change its mode
    return graph.eval()


def _with_plain_quantizers(model: fx.GraphModule) -> fx.GraphModule:
    """Return a copy with operators of torch in place of quantizers, where torch has them."""
    copied = deep_copy(model)
    for node in copied.graph.nodes:
        if node.op != "call_module":
            continue
        module = copied.get_submodule(node.target)
        quantizer = module.source if isinstance(module, MovedQuantizer) else module
        if isinstance(quantizer, TensorQuantizer) and _is_plain(quantizer):
            copied.set_submodule(node.target, _PlainQuantizer(quantizer))
    return copied


def _is_plain(quantizer: TensorQuantizer) -> bool:
    """Whether an operator of torch computes what a quantizer does."""
    scheme, scale = quantizer.scheme, quantizer.scale
    is_integer = scheme.fmt.scaled and not scheme.fmt.is_float and scheme.fmt.bits <= 16
    is_per_tensor = scheme.qscheme is QSchemeType.per_tensor and not quantizer.is_dynamic
    is_rounded = scheme.rounding is RoundType.half_even and not scheme.float_zero_point
    return is_integer and is_per_tensor and is_rounded and scale is not None and scale.dim() == 0


def dynamic_shapes(model: fx.GraphModule, kwargs: dict[str, Any]) -> Any:
    """Return the axes of the inputs that have any size, as ``torch.export.export`` takes them."""
    values = [node.meta.get("val") for node in model.graph.nodes if node.op == "placeholder"]
    axes = [
        {a: torch.export.Dim.AUTO for a, n in enumerate(v.shape) if not isinstance(n, int)} or None
        if isinstance(v, torch.Tensor)
        else None
        for v in values
    ]
    shapes, named = tree_unflatten(axes, model._in_spec)
    if not kwargs:
        return shapes
    codegen: Any = model.graph._codegen  # graphs of torch.export have pytree_info
    names = codegen.pytree_info.orig_args
    return dict(zip((name for name in names if name != "self"), shapes, strict=False)) | named
