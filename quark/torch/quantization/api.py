"""Quantize a model in place: the public face of the pipeline."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn

from quark.torch.graph.discovery import discover
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.batches import excerpt, parts, repeatable, run_batch
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.statistics import Statistics
from quark.torch.pipeline.tensor_ranges import is_told
from quark.torch.quantization.calibration import (
    calibrate_activations,
    calibrate_parameters,
    needs_data,
    observing,
    recall_activations,
    recall_tokens,
    settle_weights,
    share_scales,
)
from quark.torch.quantization.config.algo import AlgoConfig, RoundingConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.attention import key_projections, prove_keys, route_keys
from quark.torch.quantization.nn.experts import fuse, unfuse
from quark.torch.quantization.nn.layer import PARAMETERS, QuantMixin
from quark.torch.quantization.preparation import plan, prepare, quantized_layers, restore

logger = logging.getLogger("quark")

Model = TypeVar("Model", bound=nn.Module)

# Algorithms by the name of their options: "module:attribute", loaded on use.
ALGORITHMS: dict[str, str] = {
    "smooth": "quark.torch.algorithm.smoothquant:ALGORITHM",
    "autosmoothquant": "quark.torch.algorithm.autosmoothquant:ALGORITHM",
    "awq": "quark.torch.algorithm.awq:ALGORITHM",
    "rotation": "quark.torch.algorithm.rotation.rotate:ALGORITHM",
    "quarot": "quark.torch.algorithm.rotation.rotate:ALGORITHM",
    "gptq": "quark.torch.algorithm.gptq:ALGORITHM",
    "gptaq": "quark.torch.algorithm.qronos:ALGORITHM",
    "qronos": "quark.torch.algorithm.qronos:ALGORITHM",
    "yaqa": "quark.torch.algorithm.yaqa:ALGORITHM",
    "autoround": "quark.torch.algorithm.autoround:ALGORITHM",
}
FROM_STATISTICS = ("awq", "gptq")  # what can do with statistics of the float model alone


class ModelQuantizer:
    """Quantizes models by one configuration.

    Args:
        config: How to quantize.
        multi_device: Accepted for compatibility: layers may lie on any devices.
    """

    def __init__(self, config: Config, multi_device: bool = False) -> None:
        if not isinstance(config, Config):
            raise TypeError(f"ModelQuantizer takes a Config, got {type(config).__name__}.")
        self.config = config
        self.multi_device = multi_device

    def quantize_model(
        self,
        model: Model,
        dataloader: Iterable[Any] | None = None,
        statistics: Statistics | None = None,
    ) -> Model:
        """Replace modules of ``model`` in place by quantized ones and settle their ranges.

        Args:
            model: A float model, in any of float32, bfloat16 and float16, on any device.
            dataloader: Batches for the model: tensors, mappings of arguments, or lists of these.
                Needed by most algorithms and for static activation ranges.
            statistics: What ``collect_statistics`` returned for the model: AWQ or GPTQ, and without
                a dataloader static activation ranges, take them instead of running data.

        Returns:
            The same model. Its forward pass now computes with quantized values; weights stay in
            float until ``freeze``, but for those that an algorithm such as GPTQ has rounded.

        Raises:
            ValueError: The configuration does not fit, data is missing, or a range is not finite.
                The model is then as it was, unless data fails it after an algorithm changed it.
        """
        _log_to_terminal(self.config.log_severity_level)
        algorithms = find_algorithms(self.config)
        if statistics is not None:
            dataloader = None if dataloader is None else repeatable(dataloader)
            statistics.check(model, dataloader)
        experts = unfuse(model)
        try:
            layers = plan(model, self.config)
            _check_algorithms(self.config, algorithms, layers, dataloader, statistics)
            fuse(experts, keep=layers)
            keys = key_projections(layers, self.config)
            batches = repeatable(dataloader) if algorithms or keys else dataloader or ()
            looked_at = None if dataloader is None else batches
            if keys:
                prove_keys(model, keys, _trial_run(model, looked_at))
            structure = discover(model, _trial_run(model, looked_at)) if algorithms else None
        except BaseException:
            fuse(experts)
            raise
        try:
            prepare(model, layers)
            route_keys(model, keys)
            if statistics is not None:
                recall_tokens(model, statistics)
            if structure is not None:
                _apply(algorithms, model, structure, batches, self.config, statistics)
            calibrate_parameters(model)
            if needs_data(layers.values()):
                _settle_activations(model, batches, statistics if dataloader is None else None)
            share_scales(model, self.config)
        except BaseException:
            restore(model)
            fuse(experts)
            raise
        model.quant_config = self.config  # type: ignore[assignment]
        logger.info("Model quantization has been completed.")
        return model

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
        layers = [layer for _, layer in quantized_layers(model)]
        if not layers:
            raise ValueError("Nothing to freeze: call ModelQuantizer.quantize_model first.")
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
        for layer in layers:
            if not layer.frozen:
                _bake(layer, owners)
        return model


def find_algorithms(config: Config) -> list[tuple[Algorithm, AlgoConfig]]:
    """Return each algorithm that a configuration asks for with its options, in order.

    Raises:
        ValueError: One is not available, or follows one that rounds weights.
    """
    found: list[tuple[Algorithm, AlgoConfig]] = []
    for options in config.algo_config or []:
        before = found[-1][1] if found else None
        if isinstance(before, RoundingConfig):
            raise ValueError(
                f"algo_config: {options.name} follows {before.name}, which rounds weights for "
                f"good. Put {before.name} last."
            )
        if options.name not in ALGORITHMS:
            raise ValueError(
                f"Algorithm {options.name!r} is not available in this version "
                f"(available: {', '.join(ALGORITHMS)})."
            )
        module, _, attribute = ALGORITHMS[options.name].partition(":")
        found.append((getattr(import_module(module), attribute), options))
    return found


def _check_algorithms(
    config: Config,
    algorithms: list[tuple[Algorithm, AlgoConfig]],
    layers: Mapping[str, QuantizationConfig],
    dataloader: Iterable[Any] | None,
    statistics: Statistics | None,
) -> None:
    """Raise if an algorithm does not serve the layers, or what it needs is not given."""
    is_static = needs_data(layers.values())
    if statistics is not None:
        check_from_statistics(algorithms, is_static)
        if is_static and dataloader is None:
            reason = _moved_ranges(config, algorithms)
            if reason is not None:
                raise ValueError(reason)
            statistics.check_ranges(layers)
    elif dataloader is None:
        learns = any(algorithm.needs_data(options) for algorithm, options in algorithms)
        if learns or is_static:
            raise ValueError(
                f"{'Algorithms need' if learns else 'Static activation ranges need'} "
                "calibration data: pass a dataloader to quantize_model"
                + ("." if learns else ", or set is_dynamic=True.")
            )
    for algorithm, options in algorithms:
        algorithm.check(options, layers)


def check_from_statistics(
    algorithms: list[tuple[Algorithm, AlgoConfig]], is_static: bool = False
) -> None:
    """Raise if algorithms are not one that can do with statistics of the float model.

    Args:
        algorithms: What ``find_algorithms`` returned.
        is_static: Whether there are static activation ranges, for which no algorithm is needed.

    Raises:
        ValueError: They are not.
    """
    names = [options.name for _, options in algorithms]
    if is_static and not names:
        return
    if len(names) != 1 or names[0] not in FROM_STATISTICS:
        raise ValueError(
            f"statistics serve one algorithm, {' or '.join(FROM_STATISTICS)}, and static "
            f"activation ranges, got {', '.join(names) or 'none'}: others change what they are of, "
            "or look at the data itself. Pass a dataloader instead."
        )
    if getattr(algorithms[0][1], "true_sequential", False):
        raise ValueError(
            "gptq: true_sequential=True looks at layers in turn, which statistics of the float "
            "model cannot. Leave it out, or pass a dataloader instead."
        )


def _moved_ranges(config: Config, algorithms: list[tuple[Algorithm, AlgoConfig]]) -> str | None:
    """Return why static activation ranges are not those of tensors of the float model, or None."""
    if any(options.name == "awq" for _, options in algorithms):
        return (
            "awq rescales inputs, so that statistics of the float model no longer tell their "
            "static ranges: pass a dataloader with the same data too, or set is_dynamic=True."
        )
    if config.kv_cache_post_rope and needs_data(config.kv_cache_quant_config.values()):
        return (
            "kv_cache_post_rope: statistics tell static ranges of keys before rotary embedding "
            "alone. Pass a dataloader too, or set is_dynamic=True."
        )
    return None


def ranges_from_statistics(
    config: Config,
    algorithms: list[tuple[Algorithm, AlgoConfig]],
    layers: Iterable[QuantizationConfig],
) -> bool:
    """Whether statistics of the float model tell the static activation ranges of layers."""
    static = [
        spec
        for layer in layers
        for tensor, spec in layer.specs()
        if tensor not in PARAMETERS and spec.needs_data
    ]
    return not static or (_moved_ranges(config, algorithms) is None and all(map(is_told, static)))


def _apply(
    algorithms: list[tuple[Algorithm, AlgoConfig]],
    model: nn.Module,
    structure: Structure,
    batches: Iterable[Any],
    config: Config,
    statistics: Statistics | None,
) -> None:
    """Apply algorithms in order, once none of them has anything against it."""
    layers = dict(quantized_layers(model))
    settle = partial(settle_weights, config=config)
    runs, grams = (batches, None) if statistics is None else ((), statistics.grams)
    context = Context(model, layers, structure, runs, config, settle, grams=grams)
    with observing(model, ()):
        rotated: frozenset[str] = frozenset()
        for algorithm, options in algorithms:
            rotated |= set(algorithm.resolve(replace(context, rotated=rotated), options))
        for algorithm, options in algorithms:
            logger.info("%s …", options.name)
            algorithm.apply(context, options)


def _settle_activations(
    model: nn.Module, batches: Iterable[Any], statistics: Statistics | None
) -> None:
    if statistics is None:
        calibrate_activations(model, batches)
    else:
        recall_activations(model, statistics)


def _trial_run(model: nn.Module, batches: Iterable[Any] | None) -> Callable[[], None]:
    """Return what runs a model on the first tokens of the data, or on any."""
    if batches is not None:
        first = next(iter(parts(batches)), None)
        if first is None:
            raise ValueError("The dataloader is empty: algorithms need at least a batch.")
    else:
        words = getattr(getattr(model, "config", None), "vocab_size", None)
        if not words:
            raise ValueError(
                f"{type(model).__name__} does not tell the size of its vocabulary: pass a "
                "dataloader with a batch, to see the model run."
            )
        first = torch.arange(32).unsqueeze(0) % words
    return lambda: run_batch(model, excerpt(first))


def _log_to_terminal(severity: int | None) -> None:
    """Show the log of this package unless the application has set up its own logging."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[QUARK-%(levelname)s]: %(message)s"))
        logger.addHandler(handler)
        # 0, 1, 2, … of the configuration are debug, info, warning, …
        logger.setLevel(logging.DEBUG + 10 * (1 if severity is None else severity))


def _bake(layer: QuantMixin, owners: Counter[int]) -> None:
    for name, quantizer in layer.parameter_quantizers().items():
        parameter = getattr(layer, name)
        is_tied = owners[id(parameter)] > 1  # the other owner keeps its values
        if is_tied or not parameter.is_contiguous():
            # Products round as those of what is loaded, which is contiguous.
            copied = parameter.detach().clone(memory_format=torch.contiguous_format)
            parameter = nn.Parameter(copied, parameter.requires_grad)
            setattr(layer, name, parameter)
        quantizer.bake_(parameter.data)
    layer.frozen = True
