"""The plan of ``quark quantize``: what the run takes, and whether this machine has it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quark.cli import console
from quark.cli.console import format_bytes
from quark.cli.options import counted_windows
from quark.cli.quantize.config import layer_configs
from quark.cli.quantize.finish import plan_finish
from quark.cli.quantize.request import Request
from quark.cli.quantize.source import converted_bytes, open_source, source_files, stored_bytes
from quark.cli.tokenizer_memory import tokenizer_memory

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.export.checkpoint.reader import Reader
    from quark.torch.pipeline.requirements import Machine, Requirements
    from quark.torch.pipeline.run_steps import Run
    from quark.torch.pipeline.shapes import DataShape
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.model_shape import LayerKind, Layers

PROBE, GLANCE = 0.25, 0.02  # seconds of each part of the probe: for --plan, and before a run


class Problem(NamedTuple):
    """Something that this machine has too little of.

    Attributes:
        flag: The flag that it is about.
        message: What is missing, and what to do.
        is_certain: Whether the run would fail or break its promise.
    """

    flag: str
    message: str
    is_certain: bool


class RunPlan(NamedTuple):
    """What a run takes.

    Attributes:
        requirements: Memory, disk and arithmetic.
        least: The least ``--max_memory`` under which it stays, in bytes.
        machine: Speed of this machine.
        kinds: What is quantized how, and what stays in float.
        problems: What this machine has too little of.
    """

    requirements: Requirements
    least: int
    machine: Machine
    kinds: list[LayerKind]
    problems: list[Problem]

    @property
    def seconds(self) -> float:
        """Estimated time of the run."""
        return self.requirements.seconds(self.machine)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON; sizes in bytes, times in seconds."""
        needs = self.requirements
        return {
            "memory": needs.memory,
            "device_memory": needs.device_memory,
            "devices": needs.devices,
            "least_max_memory": self.least,
            "streamed": needs.is_streamed,
            "output": needs.output,
            "spilled": dict(zip(("weights", "activations"), needs.spilled, strict=True)),
            "read": needs.read,
            "network": needs.network,
            "passes": round(needs.passes, 2),
            "flops": needs.flops,
            "seconds": round(self.seconds, 1),
            "machine": self.machine._asdict(),
            "steps": [step._asdict() for step in needs.steps],
            "layers": [
                kind._asdict() | {"config": None if kind.config is None else kind.config.to_dict()}
                for kind in self.kinds
            ],
            "problems": [problem.message for problem in self.problems],
        }


def make_plan(
    request: Request,
    config: Config,
    devices: Sequence[str],
    length: int,
    is_calibrated: bool,
    through_files: bool = False,
) -> RunPlan:
    """Return the plan of a request, from the headers of safetensors or of a GGUF file.

    Args:
        request: The flags.
        config: The configuration.
        devices: Device of the model, or several that share the work.
        length: Tokens per window of calibration data.
        is_calibrated: Whether calibration data runs.
        through_files: Whether tensors go from files to files.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    import torch

    from quark.torch.export.checkpoint.float_source import fill_with_placeholders
    from quark.torch.export.checkpoint.prequantized import find_kept, saved_bytes
    from quark.torch.export.recognition import exceeds_memory
    from quark.torch.pipeline.memory_limit import free_memory, taken_memory
    from quark.torch.pipeline.requirements import least_bound, require
    from quark.torch.quantization.model_shape import list_selected, selected

    model, files = open_source(request)
    tokenizer = tokenizer_memory(request.model_dir)
    size = sum(entry.nbytes for entry in files.entries.values())
    fill_with_placeholders(model)
    with selected(model, config) as selection:
        layers = selection[1]
        run = _describe_run(request, config, model, selection, devices, length, is_calibrated)
        kept = find_kept(model, files, layers) if config.keep_prequantized_layers else {}
        kinds = list_selected(model, config, layers, {n: x.quant_config for n, x in kept.items()})
        saved = saved_bytes(model, kept) if request.export_weight_format != "fake_quantized" else 0
        run = run._replace(output=run.output - len(request.exports) * saved)
    converted = converted_bytes(model, files)
    run = run._replace(
        model=run.model._replace(converted=converted, stored=stored_bytes(request)),
        through_files=through_files,
        threads=torch.get_num_threads(),
        tokenizer_loading=tokenizer.loading,
        tokenizer=tokenizer.writing if "gguf" in request.exports else 0,
    )
    taken = taken_memory() + tokenizer.kept
    bound, free = request.max_memory, free_memory()
    if bound is None and exceeds_memory(size, devices[0]):
        bound = taken + free
    needs, least = require(run, taken + _kernels(request, files), bound), least_bound(run, taken)
    problems = [
        *_find_memory_problems(request, run, needs, least, taken + free),
        *_find_device_problems(needs, devices),
        *_find_disk_problems(request, needs),
    ]
    return RunPlan(needs, least, _probe_machine(request, model, devices[0]), kinds, problems)


def _kernels(request: Request, files: Reader) -> int:
    """Return the bytes that kernels for CPUs will take; runs under a bound leave them out."""
    from quark.torch.numerics.native.compilation import LEAST_ELEMENTS, expected_memory

    is_large = any(math.prod(entry.shape) >= LEAST_ELEMENTS for entry in files.entries.values())
    return expected_memory() if is_large and request.max_memory is None else 0


def _probe_machine(request: Request, model: nn.Module, device: str) -> Machine:
    """Return the speed of this machine, of disks and of products in the type of the model."""
    from quark.torch.pipeline.machine import probe

    return probe(
        source_files(request),
        _existing(request.output_dir),
        next(model.parameters()).dtype,
        device,
        PROBE if request.plan else GLANCE,
    )


def _describe_run(
    request: Request,
    config: Config,
    model: nn.Module,
    selection: tuple[Config, Layers],
    devices: Sequence[str],
    length: int,
    is_calibrated: bool,
) -> Run:
    from quark.torch.export.writability import selected_size
    from quark.torch.pipeline.run_steps import Run
    from quark.torch.quantization.algorithms import count_with_random, find_algorithms
    from quark.torch.quantization.cache_scales import FACTORS, searches_heads
    from quark.torch.quantization.calibration import needs_data
    from quark.torch.quantization.config.algo import RoundingConfig
    from quark.torch.quantization.config.export import JsonExporterConfig
    from quark.torch.quantization.model_shape import measure_selected

    resolved, layers = selection
    shape = measure_selected(model, layers)
    algorithms = find_algorithms(config)
    tokens = count_with_random(request.num_calib_data * length, algorithms) if is_calibrated else 0
    data = _describe_data(model, tokens, length, len(shape.blocks))
    options = JsonExporterConfig(weight_format=request.export_weight_format)
    mode = request.custom_mode if "hf_format" in request.exports else "quark"
    stored = selected_size(model, resolved, layers, options, mode)
    windows, window = counted_windows(request.num_eval_data or 0), request.eval_seq_len or length
    return Run(
        model=shape,
        data=data,
        algorithms=[(o.name, partial(algorithm.work, o)) for algorithm, o in algorithms],
        proves=len({kind for a, options in algorithms for kind in a.proves(options)}),
        is_static=is_calibrated and needs_data(layer_configs(config)),
        output=stored * (len(request.exports) + request.params_save),
        packed=max(0, stored - (shape.size - shape.changed)),
        evaluated=0 if request.skip_evaluation else windows * window,
        evaluated_batch=request.evaluation_batch * window,
        evaluated_window=window,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        rounds=any(isinstance(options, RoundingConfig) for _, options in algorithms),
        on_device=devices[0] != "cpu",
        devices=len(devices),
        attends=2 * len(FACTORS) if is_calibrated and searches_heads(config) else 0,
        traces="onnx" in request.exports,
        traces_cache=request.use_cache,
        finish=plan_finish(request, model, layers),
    )


def _describe_data(model: nn.Module, tokens: int, length: int, blocks: int) -> DataShape:
    from quark.torch.pipeline.chunks import tokens_of_chunk
    from quark.torch.quantization.model_shape import describe_data

    return describe_data(model, tokens, min(tokens_of_chunk(length), tokens), length, blocks)


def _find_memory_problems(
    request: Request, run: Run, needs: Requirements, least: int, machine: int
) -> list[Problem]:
    """Return what is too little for the memory that a run takes.

    Args:
        request: The flags.
        run: The run.
        needs: What it takes.
        least: The least bound under which it stays.
        machine: Bytes that this process may take on this machine.
    """
    bound = request.max_memory
    if bound is not None and needs.memory > bound:
        return [
            Problem(
                "--max_memory",
                f"{format_bytes(bound)} is too little: this run takes "
                f"{format_bytes(least)} or more. Give --max_memory {round_up(least)}, or less "
                "calibration data (--num_calib_data, --seq_len).",
                True,
            )
        ]
    problems = []
    if needs.memory > machine:
        if least < min(machine, needs.memory) and not needs.is_streamed:
            remedy = f"Give --max_memory {round_up(least)} or more: the results are the same."
        else:
            remedy = (
                f"The least is {format_bytes(least)}. Give less calibration data "
                "(--num_calib_data, --seq_len), another algorithm, or a larger machine."
            )
        problems.append(
            Problem(
                "--model_dir",
                f"the run takes {format_bytes(needs.memory)} of memory, but this machine has "
                f"{format_bytes(machine)}. {remedy}",
                False,
            )
        )
    for name, work in run.algorithms:
        if needs.is_streamed and not all(work(b, run.data).is_local for b in run.model.blocks):
            problems.append(
                Problem(
                    "--quant_algo",
                    f"{name} needs the whole model in memory with these options, but the model is "
                    "read in parts. Leave --max_memory out, on a larger machine.",
                    True,
                )
            )
    return problems


def _find_device_problems(needs: Requirements, devices: Sequence[str]) -> list[Problem]:
    import torch

    from quark.torch.pipeline.memory_limit import free_on_device

    problems = []
    for device in devices:
        free = free_on_device(torch.device(device))
        if free is not None and needs.device_memory > free:
            text = (
                f"the run takes {format_bytes(needs.device_memory)} of {device}, which has "
                f"{format_bytes(free)} free. Give --max_memory, or --device cpu."
            )
            problems.append(Problem("--device", text, False))
    return problems


def _find_disk_problems(request: Request, needs: Requirements) -> list[Problem]:
    """Return the disks with too little room for what is written to them together."""
    import shutil

    weights, activations = needs.spilled
    temporary = Path(tempfile.gettempdir())
    places = {
        "--output_dir": (request.output_dir, needs.output),
        "TMPDIR": (temporary, weights),
        "--offload_dir": (request.offload_dir or temporary, activations),
    }
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for flag, (place, size) in places.items():
        existing = _existing(place)
        if size:
            disks.setdefault(existing.stat().st_dev, []).append((flag, existing, size))
    problems = []
    for entries in disks.values():
        needed, free = sum(size for *_, size in entries), shutil.disk_usage(entries[0][1]).free
        if needed > free:
            flags = " and ".join(flag for flag, *_ in entries)
            problems.append(
                Problem(
                    entries[0][0],
                    f"{entries[0][1]} has {format_bytes(free)} free, but {format_bytes(needed)} "
                    f"will be written there. Make room, or choose other directories with {flags}.",
                    True,
                )
            )
    return problems


def check_plan(plan: RunPlan) -> None:
    """Refuse a run that this machine has too little for; warn where that is not certain.

    Raises:
        typer.BadParameter: The message has what to do.
    """
    import logging

    for problem in sorted(plan.problems, key=lambda problem: not problem.is_certain):
        if problem.is_certain:
            raise console.wrong(problem.flag, problem.message)
        logging.getLogger(__name__).warning("%s", problem.message)


def _existing(path: Path) -> Path:
    """Return a directory, or the nearest one above it that exists."""
    path = path.resolve()
    return next(p for p in (path, *path.parents) if p.is_dir())


def round_up(size: int) -> str:
    """Return a size that is a little more, as a flag takes it."""
    power, name = (9, "GB") if size >= 10**10 else (6, "MB") if size >= 10**7 else (3, "kB")
    return f"{-(-size // 10**power)}{name}"
