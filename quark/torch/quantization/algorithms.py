"""The algorithms of a configuration: find them, check them, apply them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from quark.torch.algorithm.registry import ALGORITHMS, load_algorithm
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.chunks import Chunks
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.input_hooks import InfiniteInput
from quark.torch.pipeline.journal import Journal
from quark.torch.pipeline.random_sequences import add_random_sequences
from quark.torch.pipeline.statistics import GIVE_DATA, Statistics
from quark.torch.pipeline.tensor_ranges import ranges_suffice
from quark.torch.quantization.calibration import (
    compute_weight_scales,
    disabled_quantizers,
    needs_data,
    requires_data,
)
from quark.torch.quantization.config.algo import (
    AlgoConfig,
    AutoSmoothQuantConfig,
    BiasCorrectionConfig,
    PruningConfig,
    RandomTokensConfig,
    RotationConfig,
    RoundingConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.quantization.config.attention import softmax_layers
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.plan import Plan
from quark.torch.quantization.preparation import quantized_layers

logger = logging.getLogger("quark")

FROM_STATISTICS = ("awq", "gptq")  # algorithms that can run on statistics of the float model


class UnfitModelError(ValueError):
    """An algorithm does not fit the model, or its options do not. The message says why.

    Attributes:
        exit_code: Exit code of commands: the call is wrong.
    """

    exit_code = 2


def find_algorithms(config: Config) -> list[tuple[Algorithm, AlgoConfig]]:
    """Return the algorithms of a configuration with their options, in order.

    Raises:
        ValueError: An algorithm is not available, follows one that rounds weights or corrects
            biases, or changes weights after one that divides or prunes them.
    """
    algorithms: list[tuple[Algorithm, AlgoConfig]] = []
    is_divided, pruning = False, None
    for options in (step for given in config.algo_config or [] for step in given.steps()):
        before = algorithms[-1][1] if algorithms else None
        if is_divided and not isinstance(options, RoundingConfig | BiasCorrectionConfig):
            raise ValueError(
                f"algo_config: {options.name} follows svdquant, which divides weights into two "
                f"parts that must change together. Put svdquant after {options.name}."
            )
        is_divided |= isinstance(options, SVDQuantConfig)
        if pruning is not None and isinstance(options, RotationConfig | SVDQuantConfig):
            is_rotation = isinstance(options, RotationConfig)
            raise ValueError(
                f"algo_config: {options.name} follows {pruning}, and would replace its zeros by "
                f"other values. {f'Put {options.name} first' if is_rotation else 'Leave one out'}."
            )
        if isinstance(options, PruningConfig):
            pruning = options.name
        if isinstance(before, RoundingConfig | BiasCorrectionConfig):
            raise ValueError(_order_problem(before, options))
        if options.name not in ALGORITHMS:
            raise ValueError(
                f"Algorithm {options.name!r} is not available in this version "
                f"(available: {', '.join(ALGORITHMS)})."
            )
        algorithms.append((load_algorithm(options.name), options))
    return algorithms


def _order_problem(before: AlgoConfig, options: AlgoConfig) -> str:
    """Return why an algorithm cannot follow one that rounds weights or corrects biases."""
    is_correction = [isinstance(given, BiasCorrectionConfig) for given in (before, options)]
    is_rounding = [isinstance(given, RoundingConfig) for given in (before, options)]
    reason, remedy = "which rounds weights for good", f"Put {before.name} last"
    if is_correction[0]:
        reason = "which corrects biases for the weights that it received"
    if any(is_correction) and any(is_rounding):
        remedy = "Leave bias_correction out: the other one minimizes the whole error of the outputs"
    return f"algo_config: {options.name} follows {before.name}, {reason}. {remedy}."


def check_algorithms(
    config: Config,
    algorithms: list[tuple[Algorithm, AlgoConfig]],
    layers: Mapping[str, QuantizationConfig],
    dataloader: Iterable[Any] | None,
    statistics: Statistics | None,
) -> None:
    """Raise if an algorithm does not support the layers, or lacks the data that it needs.

    Args:
        config: Configuration of the model.
        algorithms: Result of ``find_algorithms``.
        layers: Configuration of each layer that will be quantized.
        dataloader: Calibration data, or None.
        statistics: Statistics of the float model, or None.

    Raises:
        ValueError: The message names the algorithm or the layer.
    """
    every = [*layers.values(), *softmax_layers(config)]
    is_static = needs_data(every)
    if statistics is not None:
        check_from_statistics(algorithms, is_static)
        if is_static and dataloader is None:
            reason = _range_problem(config, algorithms)
            if reason is not None:
                raise ValueError(reason)
            statistics.check_ranges(layers)
    elif dataloader is None:
        learns = any(algorithm.needs_data(options) for algorithm, options in algorithms)
        if learns or requires_data(every):
            raise ValueError(
                f"{'Algorithms need' if learns else 'Static activation ranges need'} "
                "calibration data: pass a dataloader to quantize_model"
                + ("." if learns else ", or set is_dynamic=True.")
            )
    for algorithm, options in algorithms:
        algorithm.check(options, layers)


def check_for_graphs(algorithms: list[tuple[Algorithm, AlgoConfig]]) -> None:
    """Raise if an algorithm needs inputs that layers round themselves, which graphs round before.

    Args:
        algorithms: Result of ``find_algorithms``.

    Raises:
        ValueError: An algorithm adds branches, rotates inputs online, or smooths inputs.
    """
    for _, options in algorithms:
        problem = "it adds branches to layers" if isinstance(options, SVDQuantConfig) else ""
        if isinstance(options, SmoothQuantConfig | AutoSmoothQuantConfig):
            problem = "it smooths inputs that layers round themselves"
        if isinstance(options, RotationConfig):
            online = options.online_config and options.online_config.online_rotation_layers
            problem = (
                "it rotates inputs online"
                if options.r4 or options.online_r1_rotation or online
                else ""
            )
        if problem:
            raise ValueError(
                f"algo_config: {options.name} does not work on graphs: {problem}, and graphs round "
                "inputs before these layers. Leave it out, or quantize the eager model."
            )


def check_from_statistics(
    algorithms: list[tuple[Algorithm, AlgoConfig]], is_static: bool = False
) -> None:
    """Raise if the algorithms cannot run on statistics of the float model.

    Args:
        algorithms: Result of ``find_algorithms``.
        is_static: Whether there are static activations, which statistics serve without algorithms.

    Raises:
        ValueError: There is another algorithm, or more than one.
    """
    names = [options.name for _, options in algorithms]
    if is_static and not names:
        return
    if len(names) != 1 or names[0] not in FROM_STATISTICS:
        served = f"one algorithm, {' or '.join(FROM_STATISTICS)}, and static activation ranges"
        if not names:
            raise ValueError(f"statistics serve {served}, got none. Leave the statistics out.")
        raise ValueError(
            f"statistics serve {served}, got {', '.join(names)}: other algorithms change the "
            f"inputs of layers, or need the data itself. Leave the statistics out, and "
            f"{GIVE_DATA}."
        )
    if getattr(algorithms[0][1], "true_sequential", False):
        raise ValueError(
            "gptq: true_sequential=True observes each layer after earlier ones are rounded, so "
            "statistics of the float model do not apply. Leave it out, or "
            f"{GIVE_DATA} instead."
        )
    if getattr(algorithms[0][1], "choose_damping", False):
        raise ValueError(
            "gptq: choose_damping=True holds a part of the data back, and statistics are sums over "
            f"all of it. Leave it out, or {GIVE_DATA} instead."
        )
    if _random_share(algorithms[0][1]):
        raise ValueError(
            f"{names[0]}: random_tokens adds sequences to the data, and statistics are sums over "
            f"the data alone. Leave it out, or {GIVE_DATA} instead."
        )


def _random_share(options: AlgoConfig) -> float:
    """Return the random sequences for each sequence of the data that an algorithm receives."""
    return options.random_tokens if isinstance(options, RandomTokensConfig) else 0.0


def count_with_random(tokens: int, algorithms: Iterable[tuple[Algorithm, AlgoConfig]]) -> int:
    """Return the most tokens that an algorithm receives, given those of the data."""
    return math.ceil(tokens * (1 + max((_random_share(o) for _, o in algorithms), default=0.0)))


def _range_problem(config: Config, algorithms: list[tuple[Algorithm, AlgoConfig]]) -> str | None:
    """Return why statistics of the float model lack the static activation ranges, or None."""
    if any(options.name == "awq" for _, options in algorithms):
        return (
            "awq rescales inputs, so statistics of the float model do not have their static "
            "ranges: pass a dataloader with the same data too, or set is_dynamic=True."
        )
    if needs_data(softmax_layers(config)):
        return (
            "softmax_quant_spec: statistics do not have the static range of probabilities. Pass a "
            "dataloader too, or set is_dynamic=True."
        )
    if needs_data(config.query_quant_config.values()):
        return (
            "query_quant_config: statistics do not have the static ranges of queries after rotary "
            "embedding. Pass a dataloader too, or set is_dynamic=True."
        )
    if config.kv_cache_post_rope and needs_data(config.kv_cache_quant_config.values()):
        return (
            "kv_cache_post_rope: statistics only have the static ranges of keys before rotary "
            "embedding. Pass a dataloader too, or set is_dynamic=True."
        )
    return None


def ranges_from_statistics(
    config: Config,
    algorithms: list[tuple[Algorithm, AlgoConfig]],
    layers: Iterable[QuantizationConfig],
) -> bool:
    """Whether statistics of the float model have the static activation ranges of layers."""
    static = [
        spec
        for layer in layers
        for tensor, spec in layer.specs()
        if tensor not in PARAMETERS and spec.needs_data
    ]
    return not static or (
        _range_problem(config, algorithms) is None and all(map(ranges_suffice, static))
    )


def apply_algorithms(
    model: nn.Module, plan: Plan, structure: Structure, journal: Journal | None = None
) -> None:
    """Apply algorithms in order, after each of them has checked the structure of the model.

    Args:
        model: A prepared model.
        plan: How to quantize it.
        structure: Structure of the float model.
        journal: Where finished blocks are, and go to.

    Raises:
        UnfitModelError: The structure lacks something that an algorithm needs. No algorithm has
            been applied.
    """
    batches, grams = (
        (plan.batches, None) if plan.statistics is None else ((), plan.statistics.grams)
    )
    context = Context(
        model,
        dict(quantized_layers(model)),
        structure,
        batches,
        plan.config,
        partial(compute_weight_scales, config=plan.config),
        grams=grams,
        journal=journal,
    )
    contexts = [_with_random_tokens(context, options) for _, options in plan.algorithms]
    with disabled_quantizers(model):
        rotated: frozenset[str] = frozenset()
        for own, (algorithm, options) in zip(contexts, plan.algorithms, strict=True):
            try:
                rotated |= set(algorithm.resolve(replace(own, rotated=rotated), options))
            except ValueError as error:
                raise UnfitModelError(str(error)) from error
        for own, (algorithm, options) in zip(contexts, plan.algorithms, strict=True):
            logger.info("%s …", options.name)
            try:
                algorithm.apply(own, options)
            except InfiniteInput as error:
                raise ValueError(f"{options.name}: {error.describe(context.layers)}") from None


def _with_random_tokens(context: Context, options: AlgoConfig) -> Context:
    """Return the context of an algorithm, whose data has the random sequences of its options."""
    share = _random_share(options)
    if not share:
        return context
    batches = add_random_sequences(context.batches, share, context.model)
    return replace(context, batches=Chunks(batches))
