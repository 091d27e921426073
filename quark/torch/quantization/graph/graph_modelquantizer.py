"""``FxGraphQuantizer``: export a model as a graph, quantize it, train it, write it as ONNX."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from quark.torch.export.api import export_onnx
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.quantization.graph_mode.inputs import check_arguments
from quark.torch.quantization.graph_mode.quantization import is_exported
from quark.torch.quantization.graph_mode.tracing import trace_graph
from quark.torch.quantization.preparation import quantized_layers


class FxGraphQuantizer(ModelQuantizer):
    """Quantizes models as graphs; it exports them itself.

    Args:
        config: How to quantize. Its ``quant_mode`` may be left out.
        multi_device: Accepted for compatibility.
    """

    def __init__(self, config: Config, multi_device: bool = False) -> None:
        super().__init__(config, multi_device)
        self.config = replace(config, quant_mode=QuantizationMode.fx_graph_mode)

    def quantize_model(  # type: ignore[override]
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
        calibdata: Iterable[Any] | None = None,
        trainer: Callable[[GraphModule], GraphModule | None] | None = None,
    ) -> GraphModule:
        """Return a quantized graph of a model.

        Args:
            model: A float model, or its graph. It is not changed.
            args: Example of the arguments, which fixes their shapes. A graph does not need it.
            kwargs: Example of keyword arguments.
            dynamic_shapes: Axes that may have any size, as ``torch.export.export`` takes them.
            calibdata: Batches for static ranges and algorithms.
            trainer: Trains the quantized graph, and returns it.

        Raises:
            TypeError: The model is no module, or the trainer no function or one that returns
                something else.
            ValueError: The model cannot be traced, the configuration does not fit, data is
                missing, or a value is not finite.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got a {type(model).__name__}.")
        if trainer is not None and not callable(trainer):
            raise TypeError(
                "trainer: expected a function that takes the quantized graph and trains it, got a "
                f"{type(trainer).__name__}."
            )
        graph = model if is_exported(model) else trace_graph(model, args, kwargs, dynamic_shapes)
        quantized = super().quantize_model(graph, calibdata)
        assert isinstance(quantized, GraphModule)
        trained = quantized if trainer is None else trainer(quantized)
        if trained is None:
            return quantized  # trained in place
        if not isinstance(trained, GraphModule):
            raise TypeError(
                "trainer: expected a function that returns the graph it was given, got a "
                f"{type(trained).__name__} from it."
            )
        return trained

    def export_onnx_model(
        self, model: GraphModule, input_args: tuple[Any, ...], export_dir: str | Path
    ) -> None:
        """Write ``quark_model.onnx``.

        Args:
            model: A graph from ``quantize_model``, frozen or not. It is not changed.
            input_args: Example of the arguments.
            export_dir: Directory to write.

        Raises:
            FileExistsError: The directory is in use.
            ValueError: The model is not quantized or does not take the arguments, or ONNX cannot
                express it.
        """
        check_arguments(model, tuple(tree_leaves(input_args)))
        is_frozen = all(layer.frozen for _, layer in quantized_layers(model))
        frozen = model if is_frozen else self.freeze(copy.deepcopy(model).eval())
        export_onnx(model=frozen, output_dir=export_dir, input_args=input_args)
