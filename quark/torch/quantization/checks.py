"""Checks of configuration, model and data before the model is changed; they make the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.samples import complete_batches
from quark.torch.graph.changed_parameters import find_changed_parameters
from quark.torch.graph.discovery import discover
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.float_products import SWITCH, widens_products
from quark.torch.graph.quantized_mark import marked
from quark.torch.graph.shared_inputs import same_input_groups
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.batches import flatten_batches, run_batch, take_excerpt
from quark.torch.pipeline.chunks import Chunks
from quark.torch.pipeline.data_source import check_batches, make_repeatable
from quark.torch.pipeline.model_state import restored
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.run_request import identify_files, model_files, thread_count
from quark.torch.pipeline.statistics import GIVE_DATA, Statistics
from quark.torch.quantization.algorithms import check_algorithms, find_algorithms
from quark.torch.quantization.calibration import needs_data, requires_data
from quark.torch.quantization.config.attention import softmax_layers
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.name_lookup import names_as_subject
from quark.torch.quantization.config.parts import has_towers
from quark.torch.quantization.config.resolution import (
    add_shared_inputs,
    resolve_names,
    shares_inputs,
)
from quark.torch.quantization.direct_reads import leave_unpassed_in_float
from quark.torch.quantization.nn.attention import attention_projections
from quark.torch.quantization.nn.attention_trial import prove_projections
from quark.torch.quantization.nn.cached_outputs import layers_to_prove, prove_cached_outputs
from quark.torch.quantization.nn.experts import stack_experts, temporarily_split_experts
from quark.torch.quantization.nn.fused_layers import with_fused_layers
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.nn.probabilities import (
    find_idle,
    probability_modules,
    probability_quantizers,
    quantize_probabilities,
)
from quark.torch.quantization.plan import Plan, prepare
from quark.torch.quantization.preparation import (
    check_parameters,
    quantized_layers,
    select_layers,
)
from quark.torch.quantization.reachability import leave_unreached_in_float
from quark.torch.quantization.sequence_rows import keep_rows_together

logger = logging.getLogger("quark")


def check(
    model: nn.Module,
    config: Config,
    dataloader: Iterable[Any] | None,
    statistics: Statistics | None,
) -> Plan:
    """Check that a configuration fits a model and the data, and return what will be done.

    Args:
        model: A float model. It is unchanged afterwards.
        config: How to quantize it.
        dataloader: Calibration data, or None.
        statistics: Statistics of the model, or None.

    Raises:
        ValueError: The configuration does not fit the model, or data is missing.
    """
    algorithms = find_algorithms(config)
    if statistics is not None:
        dataloader = None if dataloader is None else make_repeatable(dataloader)
        _check_statistics(model, config, dataloader, statistics)
    with marked(model), temporarily_split_experts(model) as experts:
        config = with_fused_layers(config, model)
        shares, config = shares_inputs(config), resolve_names(config, model)
        layers = select_layers(model, config)
        if dataloader is None:
            config, layers = leave_unpassed_in_float(model, config, layers)
        check_algorithms(config, algorithms, layers, dataloader, statistics)
        check_parameters(model)
        is_static = needs_data([*layers.values(), *softmax_layers(config)])
        routes = attention_projections(layers, config) or config.softmax_quant_spec
        cached = layers_to_prove(model, layers, config)
        runs = bool(algorithms or is_static or shares or routes or cached)
        data = make_repeatable(dataloader) if dataloader is not None and runs else dataloader
        required = [*layers.values(), *softmax_layers(config)]
        if not algorithms and is_static and not requires_data(required):
            data = _none_if_empty(data)  # trained ranges start from the first batch of training
        digest = None if statistics is None else statistics.data
        if data is not None and runs:
            digest = check_data(model, data, bool(algorithms))
            data = keep_rows_together(model, data)
        check_steady(model, data if runs else None)
        if data is not None and (algorithms or is_static) and has_towers(model):
            config, layers = leave_unreached_in_float(model, config, layers, data)
        if data is not None:
            config, layers = leave_unpassed_in_float(model, config, layers, data)
        stack_experts(experts, keep=layers)
        projections = attention_projections(layers, config)
        config = with_shared_inputs(config, model, data) if shares else config
        probabilities = probability_modules(model, layers, config)
        if projections:
            prove_projections(model, projections, _trial_run(model, data))
        if cached:
            prove_cached_outputs(model, cached, _trial_run(model, data))
        if probabilities:
            _prove_probabilities(model, probabilities, config, _trial_run(model, data))
    batches = () if data is None else Chunks(data)
    has_data = data is not None
    parts = layers, projections, probabilities, algorithms
    return Plan(config, *parts, batches, has_data, statistics, digest)


def _check_statistics(
    model: nn.Module, config: Config, batches: Iterable[Any] | None, statistics: Statistics
) -> None:
    """Check that statistics are of a model and of data, and hold what a configuration needs.

    Raises:
        ValueError: They are not, or do not.
    """
    if config.moe_calibrate_all_experts:
        raise ValueError(
            "moe_calibrate_all_experts: statistics have the tokens that routers sent to each "
            f"expert. Leave it out, or {GIVE_DATA} instead."
        )
    statistics.check(model, batches)


def _prove_probabilities(
    model: nn.Module, names: Sequence[str], config: Config, run: Callable[[], None]
) -> None:
    """Prove by a forward pass that every attention module computes probabilities by one softmax.

    Raises:
        ValueError: One does not.
    """
    with restored(model), eval_mode(model), torch.no_grad():
        quantize_probabilities(model, names, config.softmax_quant_spec)
        for _, quantizer in probability_quantizers(model):
            quantizer.is_observing = True
        run()
        idle = find_idle(model, names)
    if idle:
        raise ValueError(
            f"softmax_quant_spec: {idle[0]} did not run on the first batch, so its probabilities "
            "have no range. Use data that reaches it, or leave softmax_quant_spec out."
        )


def check_cached_outputs(model: nn.Module, config: Config) -> None:
    """Check that layers quantized as keys and values give nothing else, as far as shapes tell.

    A model that does not run on token ids without values is not checked.

    Args:
        model: A float model, which may be on the meta device. It is unchanged afterwards.
        config: How it will be quantized.

    Raises:
        ValueError: They give other outputs too, such as queries.
    """
    operators = [name for name, module in model.named_modules() if is_operator_module(module)]
    layers = layers_to_prove(model, operators, resolve_names(config, model))
    ids = torch.zeros(1, 8, dtype=torch.int64, device="cpu")  # no values are read
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.float32, device="cpu")

    def run() -> None:
        with suppress(Exception):
            run_batch(model, {"input_ids": ids, "attention_mask": mask})

    if layers:
        prove_cached_outputs(model, layers, run)


def check_steady(model: nn.Module, batches: Iterable[Any] | None = None) -> None:
    """Check that a model does not change its parameters while it runs, as far as shapes tell.

    Codes cannot be changed so, and what a pass has changed would be stored, and changed once more
    by the loaded model. A model that does not run without values is not checked.

    Args:
        model: A float model, which may be on the meta device. It is unchanged afterwards.
        batches: Calibration data; None for any tokens.

    Raises:
        ValueError: It does.
    """
    changed: dict[str, str] = {}
    with suppress(Exception):
        batch = _trial_batch(model, batches)
        changed = find_changed_parameters(model, lambda empty: run_batch(empty, batch))
    if changed:
        raise ValueError(
            f"{names_as_subject(changed)} changed in place while {type(model).__name__} runs "
            f"({next(iter(changed.values()))}), and a quantized weight cannot be. Set the option "
            "of its configuration (config.json) that switches this off, such as rescale_every=0 "
            "of RWKV."
        )


def _none_if_empty(batches: Iterable[Any] | None) -> Iterable[Any] | None:
    return batches if batches is not None and any(True for _ in batches) else None


def check_processes(model: nn.Module, plan: Plan) -> None:
    """Check that all processes of the run have the same model, configuration and data.

    Raises:
        ValueError: They differ.
    """
    group = processes()
    if group.count == 1:
        return
    files = model_files(model)
    own = {
        "data": plan.data_digest,
        "configuration": plan.config.to_dict(everything=True),
        "version of torch": torch.__version__,
        f"products of 16-bit floats ({SWITCH} sets them)": widens_products(model),
        "number of threads": thread_count({p.device.type for p in model.parameters()}),
        "model": [_checksum(parameter.detach()) for parameter in model.parameters()],
        "files of the model": None if files is None else identify_files(files),
    }
    first, *others = group.exchange(own)
    for number, other in enumerate(others, 1):
        differing = [name for name in first if first[name] != other[name]]
        if differing:
            raise ValueError(
                f"Processes 0 and {number} differ in the {' and the '.join(differing)}: start all "
                "of them with the same files and options, and with data in the same order."
            )


def _checksum(x: torch.Tensor) -> int:
    """Return the sum of the bytes of a tensor, or 0 if its values are not in memory."""
    return int(x.view(torch.uint8).sum(dtype=torch.int64)) if x.is_contiguous() and x.dim() else 0


@contextmanager
def temporarily_quantized(model: nn.Module, config: Config) -> Iterator[None]:
    """Replace the layers of a float model by frozen ones without scales, and restore them.

    What depends on the layers alone can be checked in this state, before any data is run.

    Args:
        model: A float model.
        config: How it will be quantized.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    with temporarily_split_experts(model):
        config = resolve_names(config, model)
        layers = select_layers(model, config, warns=False)
        projections = attention_projections(layers, config)
        probabilities = probability_modules(model, layers, config)
    with restored(model):
        prepare(model, Plan(config, layers, projections, probabilities, (), (), False, None))
        for _, layer in quantized_layers(model):
            layer.frozen = True
        model.quant_config = config  # type: ignore[assignment]
        yield


def check_data(model: nn.Module, batches: Iterable[Any], has_algorithms: bool) -> str:
    """Check that a model can be expected to run on the data, and return the digest of the data.

    Raises:
        TypeError: As in ``check_batches``.
        ValueError: As in ``check_batches``, or there is no batch with a row.
    """
    digest = check_batches(model, batches)
    if digest is None:
        purpose = "algorithms need" if has_algorithms else "static activation ranges need"
        raise ValueError(f"The dataloader is empty: {purpose} at least a batch.")
    return digest


def discover_structure(model: nn.Module, plan: Plan) -> Structure | None:
    """Return the structure of a float model if an algorithm needs it.

    Experts that will be quantized are split meanwhile. The model is unchanged afterwards.

    Raises:
        ValueError: The model cannot run on the first batch.
    """
    if not plan.algorithms:
        return None
    with marked(model), temporarily_split_experts(model) as experts:
        stack_experts(experts, keep=plan.layers)
        run = _trial_run(model, plan.batches if plan.has_data else None)
        proves = {need for a, options in plan.algorithms for need in a.proves(options)}
        return discover(model, run, proves)


def _trial_run(model: nn.Module, batches: Iterable[Any] | None) -> Callable[[], None]:
    """Return a function that runs a model on the first tokens of the data, or on any tokens."""
    batch = _trial_batch(model, batches)
    return lambda: run_batch(model, batch)


def _trial_batch(model: nn.Module, batches: Iterable[Any] | None) -> Any:
    """Return the first tokens of the data, or any tokens."""
    if batches is not None:
        first = next(iter(flatten_batches(batches)), None)
        if first is None:
            raise ValueError("The dataloader is empty: algorithms need at least a batch.")
    else:
        words = getattr(getattr(model, "config", None), "vocab_size", None)
        argument = getattr(model, "main_input_name", "input_ids")
        if not words or argument != "input_ids":
            reason = "has no config with a vocab_size" if not words else f"reads {argument}"
            raise ValueError(
                f"{type(model).__name__} {reason}: pass a dataloader with a batch, which runs the "
                "model."
            )
        [first] = complete_batches(model, [torch.arange(32, device="cpu").unsqueeze(0) % words])
    return take_excerpt(first)


def with_shared_inputs(config: Config, model: nn.Module, batches: Iterable[Any] | None) -> Config:
    """Return the configuration with the layers that share an input in this model.

    Without data the model runs on any tokens; a model that does not take tokens has no groups.
    """
    try:
        with eval_mode(model):
            inputs = same_input_groups(model, _trial_run(model, batches), single=True)
    except Exception as error:
        if batches is not None:
            raise
        logger.warning(
            "shared_scale_groups: %s did not run on token ids (%s), so only layers of the "
            "documented names share scales. Pass a dataloader to find all layers that share an "
            "input.",
            type(model).__name__,
            error,
        )
        return config
    return add_shared_inputs(config, inputs)
