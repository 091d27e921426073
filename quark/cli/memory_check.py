"""Refusal of measurements that memory or disk has no room for, before any work."""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli import console
from quark.cli.console import format_bytes
from quark.cli.outputs import check_room
from quark.cli.quantize.plan import round_up
from quark.cli.tokenizer_memory import tokenizer_memory

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.export.checkpoint.reader import Loading
    from quark.torch.pipeline.run_steps import Run
    from quark.torch.pipeline.shapes import BlockShape, DataShape, LayerShape, ModelShape, Work

logger = logging.getLogger("quark")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a verb runs a model for.

    Attributes:
        source: The model, a directory or a file.
        length: Tokens of a window.
        evaluated: Windows of an evaluation, 0 for none.
        evaluated_batch: Windows of a batch of it.
        collected: Windows of statistics, 0 for none.
        probes: Number of pieces of the data on which sensitivities are measured, 0 for none.
        compared: Models whose predictions are compared, the original among them; they take turns if
            they are read in parts. 1 for none.
        kept_predictions: Number of predictions that are kept until models that run later are
            compared.
        samples_inputs: Whether inputs of layers are kept.
        measures_layers: Whether each layer is measured, in float32.
        keeps_codes: Whether a quantized model stays packed. Otherwise it is dequantized.
        dtype: Type of the parameters; ``auto`` for the stored one.
        device: Device of the model.
        max_memory: Bytes that this process may take; None for what there is.
        trust_remote_code: Whether Python code of the model may run.
        offload_dir: Directory of activations that memory does not hold; None for the default.
    """

    source: Path
    length: int
    evaluated: int = 0
    evaluated_batch: int = 1
    collected: int = 0
    probes: int = 0
    compared: int = 1
    kept_predictions: int = 0
    samples_inputs: bool = False
    measures_layers: bool = False
    keeps_codes: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    max_memory: int | None = None
    trust_remote_code: bool = False
    offload_dir: Path | None = None


def check_measurement(measurement: Measurement) -> None:
    """Check that there is room for a measurement, from the headers of the model.

    Models that Transformers alone reads are not checked.

    Raises:
        typer.BadParameter: It cannot stay below ``--max_memory``, or a disk has too little room.
    """
    from quark.torch.export.recognition import exceeds_memory
    from quark.torch.pipeline.memory_limit import free_memory, taken_memory
    from quark.torch.pipeline.requirements import least_bound, require

    run = _describe(measurement)
    if run is None:
        return
    tokenizer = tokenizer_memory(measurement.source)
    run = run._replace(tokenizer_loading=tokenizer.loading)
    taken = taken_memory() + tokenizer.kept
    bound, machine = measurement.max_memory, taken + free_memory()
    if bound is None and exceeds_memory(run.model.size, measurement.device):
        bound = machine
    needs, least = require(run, taken, bound), least_bound(run, taken)
    size = format_bytes
    if measurement.max_memory is not None and needs.memory > measurement.max_memory:
        raise console.wrong(
            "--max_memory",
            f"{size(measurement.max_memory)} is too little: {measurement.source} takes "
            f"{size(least)} or more. Give --max_memory {round_up(least)}, or less text.",
        )
    if needs.memory > machine:
        logger.warning(
            "%s takes %s of memory, but this machine has %s; the least is %s.",
            measurement.source,
            *map(size, (needs.memory, machine, least)),
        )
    place = measurement.offload_dir
    flag = "TMPDIR" if place is None else "--offload_dir"
    check_room(flag, place or Path(tempfile.gettempdir()), needs.spilled[1])


def _describe(measurement: Measurement) -> Run | None:
    """Return the run of a measurement; None where headers do not tell what it takes."""
    from quark.torch.export.checkpoint.float_source import fill_with_placeholders
    from quark.torch.export.recognition import open_in_float, recognize_container
    from quark.torch.pipeline.chunks import tokens_of_chunk
    from quark.torch.pipeline.run_steps import Run
    from quark.torch.quantization.model_shape import describe_data
    from quark.torch.statistics.requirements import list_work

    source, trusts = measurement.source, measurement.trust_remote_code
    container = recognize_container(source)
    is_quantized = container.is_quantized(source)
    has_tensors = source.is_file() or any(source.glob("*.safetensors"))
    if not has_tensors or (is_quantized and container.holds_other_model(source)):
        return None
    model, _ = open_in_float(source, measurement.dtype, trusts)
    fill_with_placeholders(model)
    shape = _shape(model)
    if shape is None:
        return None
    is_packed = measurement.keeps_codes and is_quantized and container.has_codes(source)
    if is_packed:
        shape = _packed_shape(shape, container.open(source, trusts))
    length = measurement.length
    tokens = measurement.collected * length
    steps = list_work(shape, measurement.probes) if measurement.collected else []
    if measurement.measures_layers:
        steps.append(("layers", _layer_work))
    data = describe_data(
        model, tokens, min(tokens_of_chunk(length), tokens), length, len(shape.blocks)
    )
    return Run(
        model=shape,
        data=data,
        algorithms=steps,
        proves=0,
        is_static=False,
        output=0,
        packed=0,
        evaluated=measurement.evaluated * length,
        evaluated_batch=measurement.evaluated_batch * length,
        evaluated_window=length,
        evaluation_results=_samples(measurement, shape, data),
        predictions=_predictions(measurement, data),
        interleaved=measurement.compared,
        on_device=measurement.device != "cpu",
        quantizes=False,
        unpacks=is_packed,
    )


def _samples(measurement: Measurement, shape: ModelShape, data: DataShape) -> tuple[int, ...]:
    """Return the bytes of the inputs of layers that an evaluation keeps, if it keeps any."""
    from quark.torch.report.activations import SAMPLE

    if not measurement.samples_inputs:
        return ()
    tokens = SAMPLE + measurement.evaluated  # at least one of each window
    return (tokens * data.itemsize * sum(layer.inputs for layer in shape.layers),)


def _predictions(measurement: Measurement, data: DataShape) -> int:
    """Return the bytes of the predictions that other models are compared with."""
    from quark.torch.evaluation.predictions import positions_of
    from quark.torch.pipeline.shapes import FLOAT32

    kept = measurement.kept_predictions
    if measurement.compared > 1:
        kept = measurement.evaluated * positions_of(measurement.length)
    return FLOAT32 * kept * data.labels


def _layer_work(block: BlockShape, data: DataShape) -> Work:
    """Return the memory that measuring the layers of a block takes.

    It holds copies of the largest weight, or the sum of x xᵀ over its inputs x and a factor of it.
    """
    from quark.torch.pipeline.shapes import FLOAT32, Work

    copies = 8

    def size(layer: LayerShape) -> int:
        return FLOAT32 * max(copies * layer.elements, 2 * layer.inputs**2)

    return Work(block.largest(size), changes=False)


def _shape(model: nn.Module) -> ModelShape | None:
    """Return the shapes of a model and all its linear layers but the head; None without blocks."""
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.match import literal
    from quark.torch.quantization.config.presets import scheme
    from quark.torch.quantization.config.resolution import output_head
    from quark.torch.quantization.model_shape import measure_model
    from quark.torch.quantization.nn.operators import is_operator

    heads = output_head(model)
    named = ((name, type(module)) for name, module in model.named_modules())
    if not any(is_operator(kind) and name not in heads for name, kind in named):
        return None
    return measure_model(model, Config(scheme("int8_wo"), exclude=[*map(literal, heads)]))


def _packed_shape(shape: ModelShape, loading: Loading) -> ModelShape:
    """Return the shape of a model with packed weights, given that of the float model."""
    from quark.torch.files import size_of
    from quark.torch.pipeline.unit_cache import find_units

    owners: dict[str, int] = {}
    for name, tensor in loading.outline.items():
        owner = name.rpartition(".")[0].removesuffix("_quantizer").removesuffix(".weight")
        owners[owner] = owners.get(owner, 0) + size_of({name: tensor})
    parts = [unit.part for unit in find_units(loading.model)]
    sizes = [sum(size for n, size in owners.items() if part.holds(n)) for part in parts]
    size = sum(owners.values())
    return shape._replace(size=size, stored=size, largest_unit=max(sizes, default=0))
