"""``ModelQuantizer``: quantize a model in place, step by step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from quark.torch.graph.parameter_writes import Recorder, announce_write, record_writes
from quark.torch.graph.residency import iterate_parts, residency_of
from quark.torch.pipeline.activation_store import activation_limit, offload_directory
from quark.torch.pipeline.model_state import restored_on_failure
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.algorithms import apply_algorithms
from quark.torch.quantization.calibration import calibrate
from quark.torch.quantization.checks import check, discover_structure
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.name_lookup import printable
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.plan import prepare
from quark.torch.quantization.preparation import check_plain, mark_as_quantized, quantized_layers

logger = logging.getLogger("quark")

Model = TypeVar("Model", bound=nn.Module)


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: How to quantize.
        multi_device: Accepted for compatibility: layers may lie on any devices.
        offload_dir: Directory for activations that do not fit into memory; None for that of
            temporary files.
    """

    def __init__(
        self,
        config: Config,
        multi_device: bool = False,
        offload_dir: str | Path | None = None,
    ) -> None:
        if not isinstance(config, Config):
            raise TypeError(f"ModelQuantizer takes a Config, got {type(config).__name__}.")
        self.config = config
        self.multi_device = multi_device
        self.offload_dir = offload_dir

    def quantize_model(
        self,
        model: Model,
        dataloader: Iterable[Any] | None = None,
        statistics: Statistics | None = None,
    ) -> Model:
        """Replace modules of ``model`` in place by quantized ones and compute their scales.

        Args:
            model: A float model, in any of float32, bfloat16 and float16, on any device.
            dataloader: Batches (tensor, mapping or list) for static ranges and most algorithms.
            statistics: Statistics of the model from ``collect_statistics``, instead of data.

        Returns:
            The same model, which computes with quantized values. ``freeze`` replaces its weights.

        Raises:
            TypeError: The model is compiled, parallel or has adapters.
            ValueError: The configuration does not fit, data is missing, or a value is not finite.
            OSError: The disk is too full for activations, or there is no ``offload_dir``.

        After an exception of any kind, an interrupt included, the model is as it was, bit for bit.
        For that, values that algorithms change are kept until the end: up to 1 GiB in main memory,
        more in temporary files.
        """
        with self._activations(model), restored_on_failure(model) as record:
            return self.quantize_recorded(model, dataloader, statistics, record)

    def quantize_recorded(
        self,
        model: Model,
        dataloader: Iterable[Any] | None,
        statistics: Statistics | None,
        record: Recorder,
    ) -> Model:
        """Do the work of ``quantize_model`` inside of ``restored_on_failure``.

        So the context may be left after more work, whose failure restores the model too.

        Args:
            model: A float model.
            dataloader: Batches, or None.
            statistics: Statistics of the model, or None.
            record: Takes each parameter before its values are changed.
        """
        _log_to_terminal(self.config.log_severity_level)
        check_plain(model)
        with self._activations(model):
            plan = check(model, self.config, dataloader, statistics)
            structure = discover_structure(model, plan)
            prepare(model, plan)
            if structure is not None:
                with record_writes(record):
                    apply_algorithms(model, plan, structure)
            calibrate(model, plan)
            mark_as_quantized(model, plan.config)
            if plan.data_digest is not None:
                model.calibration_sha256 = plan.data_digest  # type: ignore[assignment]
        logger.info("Model quantization has been completed.")
        return model

    @contextmanager
    def _activations(self, model: nn.Module) -> Iterator[None]:
        """Set where activations go that do not fit into memory, and how much fits."""
        residency = residency_of(model)
        limit = None if residency is None else residency.activation_limit
        with offload_directory(self.offload_dir), activation_limit(limit):
            yield

    @staticmethod
    @torch.no_grad()
    def freeze(
        model: Model, quantize: bool | None = None, runtime_options: Any | None = None
    ) -> Model:
        """Replace the weights of a quantized model in place by their quantized values.

        Tied weights are untied where only one side is quantized.

        Args:
            model: A model from ``quantize_model``.
            quantize: Accepted for compatibility.
            runtime_options: Accepted for compatibility.

        Returns:
            The same model.

        Raises:
            ValueError: The model has no quantized module.
        """
        check_plain(model)
        layers = dict(quantized_layers(model))
        if not layers:
            raise ValueError("Nothing to freeze: call ModelQuantizer.quantize_model first.")
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        for part in iterate_parts(model):
            for name, layer in layers.items():
                if part.holds(name) and not layer.frozen:
                    _freeze(layer, owners)
        return model


class _Formatter(logging.Formatter):
    """Writes messages without characters that control a terminal: names come from files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _log_to_terminal(severity: int | None) -> None:
    """Show the log of this package unless the application has set up its own logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("[QUARK-%(levelname)s]: %(message)s"))
        logger.addHandler(handler)
        # 0, 1, 2, … of the configuration are debug, info, warning, …
        logger.setLevel(logging.DEBUG + 10 * (1 if severity is None else severity))


def _freeze(layer: FakeQuantizedLayer, owners: Counter[int]) -> None:
    for name, quantizer in layer.parameter_quantizers().items():
        parameter = getattr(layer, name)
        is_tied = owners[id(parameter)] > 1  # the other owner keeps its float values
        if is_tied or not parameter.is_contiguous():
            # A loaded weight is contiguous; the product of another layout may round differently.
            copied = parameter.detach().clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(copied, parameter.requires_grad)
            setattr(layer, name, parameter)
        announce_write(parameter)
        quantizer.freeze_(parameter.data)
    layer.frozen = True
