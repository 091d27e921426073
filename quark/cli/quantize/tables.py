"""The plan and the outcome of ``quark quantize``, as tables on the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark import __version__
from quark.cli import console, models
from quark.cli.coverage import Coverage
from quark.cli.loading import show_loading
from quark.cli.metrics import Figures
from quark.cli.predicted_text import predicts_text
from quark.cli.quantize.config import needs_data
from quark.cli.quantize.outline import (
    describe_float_layers,
    describe_quantized_parts,
    why_not_kept,
)
from quark.cli.quantize.plan import RunPlan
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch import nn

    from quark.torch.distillation import Distillation
    from quark.torch.evaluation.predictions import Predictions
    from quark.torch.export.expert_tokens import ExpertTokens
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.model_shape import LayerKind


@dataclass
class Outcome:
    """Figures of a finished run."""

    shared: int = 0  # groups of layers with the same scales
    left: int = 0  # layers in float
    seconds: float = 0.0
    start: float = field(default_factory=time.monotonic)  # of the work after the plan
    before: torch.Tensor | None = None  # losses of the original, (windows,)
    after: Figures | None = None
    experts: ExpertTokens | None = None
    finish: Distillation | None = None
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def predictions(self) -> Predictions | None:
        """Perplexity of the quantized model, beside the original where that was measured."""
        if self.after is None or self.before is None:
            return None if self.after is None else self.after.predictions
        return self.after.against(self.before)

    def count_layers(self, model: Any) -> None:
        """Set the figures about the layers of a quantized model."""
        from quark.torch.quantization.calibration import group_by_parent
        from quark.torch.quantization.config.layer_types import NAMED_ONLY
        from quark.torch.quantization.nn.operators import is_operator
        from quark.torch.quantization.preparation import quantized_layers

        names = [name for name, _ in quantized_layers(model)]
        groups = model.quant_config.shared_scale_groups
        members = [m for group in groups for m in group_by_parent(names, group)]
        self.shared = sum(len(each) > 1 for each in members)
        kinds = [type(module) for module in model.modules()]
        self.left = sum(is_operator(kind) and kind not in NAMED_ONLY for kind in kinds)


def show_plan(
    request: Request,
    config: Config,
    described: dict[str, Any],
    source: str,
    calibration: str,
    outline: nn.Module | None,
    flow: str = "standard",
) -> None:
    """Print the plan of a run: model, scheme, data and output.

    Args:
        request: The flags.
        config: The configuration.
        described: Contents of the ``config.json`` of the model.
        source: How its weights are quantized, "" for a float model.
        calibration: Calibration data, in words.
        outline: The model on the meta device, or None.
        flow: How the model is read; see ``Request.flow``.
    """
    from quark.torch.quantization.config.match import report_unmatched

    if request.plan and outline is not None:  # a run warns when it prepares the model
        report_unmatched([name for name, _ in outline.named_modules()], config)
    size = console.format_bytes(models.weight_bytes(request.model_dir))
    kind = described.get("model_type", "unknown type")
    rows = {"model": f"{request.model_dir}  ({kind}, {size})"}
    if source:
        dtype = described.get("dtype") or described.get("torch_dtype") or "float32"
        dtype = dtype if request.data_type == "auto" else request.data_type
        rows["source"] = f"{source}, dequantized to {dtype}"
    if flow == "file2file":
        rows["flow"] = "file2file: tensor by tensor, no model in memory"
    rows |= scheme_rows(request, config)
    rows["in float"] = describe_float_layers(request, config, outline)
    rows["  stored"] = _describe_stored(request, config) if source else ""
    if request.config is not None:  # flags quantize other parts only where they name them
        rows["quantized too"] = describe_quantized_parts(config, outline)
    rows["calibration"] = (
        calibration
        if needs_data(config, request.statistics is not None) or request.finish
        else "none needed: "
        + ("statistics suffice" if request.statistics else "no static activation scales")
        + ("; --dataset is not read" if request.dataset else "")
    )
    if not request.skip_evaluation:
        text = request.eval_data or models.EVALUATION
        rows["evaluation"] = f"perplexity on {text}"
        rows["  tasks"] = request.tasks or ""
    elif not predicts_text(outline):
        rows["evaluation"] = f"none: {type(outline).__name__} does not predict the next token"
    rows["output"] = _describe_output(request)
    console.out.print(f"\n[bold]quark {__version__}[/] quantize")
    console.out.print(console.facts({k: escape(v) for k, v in rows.items() if v}))
    console.out.print()


def _describe_stored(request: Request, config: Config) -> str:
    """Return how layers in float of a quantized source are stored, in words."""
    if config.keep_prequantized_layers:
        return "with the codes and scales of the source, where it has them"
    return f"as floats: {why_not_kept(request) or 'keep_prequantized_layers=false'}"


def scheme_rows(request: Request, config: Config) -> dict[str, str]:
    """Return scheme, formats and algorithms in words, by title."""
    from quark.torch.quantization.config.description import describe, describe_layer

    main = describe_layer(config.global_quant_config)
    rows = {"scheme": _scheme_name(request)}
    rows |= {"  weights": main.weight, "  inputs": main.input, "  outputs": main.output}
    cache = next(iter(config.kv_cache_quant_config.values()), None)
    rows["  cache"] = "" if cache is None else describe(cache.output_tensors)
    queries = next(iter(config.query_quant_config.values()), None)
    rows["  queries"] = "" if queries is None else describe(queries.output_tensors)
    if config.softmax_quant_spec is not None:
        rows["  attention"] = describe(config.softmax_quant_spec)
    for pattern, scheme in request.layer_schemes:
        rows[f"  {pattern}"] = scheme
    rows["algorithms"] = ", ".join(options.name for options in config.algo_config or [])
    return rows


def _scheme_name(request: Request) -> str:
    """Return the scheme, with the recipe that it comes from, or the file of the configuration."""
    from quark.torch.quantization.config.recipes import RECIPES

    if request.recipe is None:
        return str(request.quant_scheme or request.config)
    name = request.recipe.lower()
    return f"{RECIPES[name][0]} (recipe {name})"


def _describe_output(request: Request) -> str:
    """Return what will be written, in words."""
    if not request.exports:
        return "no checkpoint (--model_export hf_format writes one)"
    layout = "" if request.custom_mode == "quark" else f" as {request.custom_mode}"
    how = f"{', '.join(request.exports)}{layout}, {request.export_weight_format}"
    return f"{request.output_dir}  ({how})"


def show_requirements(plan: RunPlan) -> None:
    """Print what a run takes, what will be quantized how, and what this machine lacks."""
    needs, machine = plan.requirements, plan.machine
    size = console.format_bytes
    how = "read in parts" if needs.is_streamed else "in memory"
    weights, activations = needs.spilled
    is_shared = needs.devices > 1
    each = f" on each of {needs.devices}, which share the samples" if is_shared else ""
    sender = "GPU to others" if is_shared else "process"
    rows = {
        "memory": f"{size(needs.memory)}  (interpreter {size(needs.interpreter)}, "
        f"parameters {size(needs.parameters)} {how})",
        "  least": f"{size(plan.least)}  (--max_memory)",
        "  GPU": f"{size(needs.device_memory)}{each}" if needs.device_memory else "",
        "disk": f"{size(needs.output)} output",
        "  temporary": f"{size(weights)} changed weights, {size(activations)} activations",
        "read": f"{size(needs.read)} of the model",
        "network": f"{size(needs.network)} sent by each {sender}" if needs.network else "",
        "data": f"{needs.passes:.1f} passes",
        "arithmetic": f"{needs.flops / 1e12:.3g} TFLOP",
        "time": f"about {console.format_seconds(plan.seconds)}  "
        f"({machine.flops / 1e9:.0f} GFLOP/s, reads {size(int(machine.read))}/s, "
        f"writes {size(int(machine.write))}/s)",
    }
    console.out.print(console.facts({k: v for k, v in rows.items() if v}))
    steps = console.table("Steps")
    for title in ("step", "memory", "passes", "time"):
        steps.add_column(title, justify="left" if title == "step" else "right")
    for step in needs.steps:
        seconds = needs.seconds_of(step, machine)
        memory = needs.memory_of(step)
        passes = f"{step.passes:.1f}" if step.passes else ""
        steps.add_row(step.name, size(memory), passes, console.format_seconds(seconds))
    console.out.print("", steps)
    console.out.print(_layer_table(plan.kinds))
    for problem in plan.problems:
        console.say(f"[yellow]{escape(problem.message)}[/]")


def _layer_table(kinds: Sequence[LayerKind]) -> Table:
    """Return a table of what is quantized how, and of what stays in float and why."""
    from quark.torch.quantization.config.description import describe_layer

    rows = []
    for kind in kinds:
        shape = " x ".join(map(str, kind.shape))
        cells = [f"in float: {kind.reason}", "", ""]
        if kind.config is not None:
            words = describe_layer(kind.config)
            weight = f"kept: {words.weight}" if kind.is_kept else words.weight
            cells = [weight, words.input, words.output]
        rows.append([kind.name, str(kind.number), shape, *cells])
    table = console.table("Layers")
    titles = ("layers", "number", "shape", "weight", "input", "output")
    columns = zip(*rows, strict=True) if rows else [()] * len(titles)
    shown = [(t, cells) for t, cells in zip(titles, columns, strict=True) if any(cells)]
    for title, _ in shown:
        table.add_column(title, justify="right" if title == "number" else "left", overflow="fold")
    for row in zip(*(cells for _, cells in shown), strict=True):
        table.add_row(*map(escape, row))
    return table


def show_outcome(request: Request, outcome: Outcome, plan: RunPlan | None) -> None:
    """Print the figures of a finished run beside the plan, and code that loads the output."""
    from quark.torch.export.containers.base import get_container
    from quark.torch.export.recognition import read_contents

    formats = request.exports
    rows = {}
    containers = [get_container(name) for name in formats]
    if any(container.is_read for container in containers):
        summary = read_contents(request.output_dir).summary
        rows["layers"] = f"{len(summary.layers)} quantized, {outcome.left} in float"
        rows["bits per weight"] = console.format_bits(summary.bits_per_weight)
    if formats:
        before = models.weight_bytes(request.model_dir)
        after = models.weight_bytes(request.output_dir)
        share = f"{100 * after / before:.0f} %"
        rows["size on disk"] = (
            f"{console.format_bytes(before)} → {console.format_bytes(after)} ({share})"
        )
    rows["quantizing"] = f"{outcome.seconds:.1f} s"
    if plan is not None:
        rows |= _compare(request, outcome, plan)
    if outcome.finish is not None:
        rows["finish"] = _describe_finish(outcome.finish)
    if outcome.experts is not None:
        rows["tokens per expert"] = str(outcome.experts)
    rows |= outcome.coverage.rows()
    if outcome.shared:
        rows["shared scales"] = f"{outcome.shared} groups of layers"
    if outcome.predictions is not None:
        rows["perplexity"] = console.format_perplexity(outcome.predictions)
    console.out.print("", console.facts(rows), sep="\n")
    if formats:
        show_loading(containers, request.output_dir)
    else:
        console.out.print()
    if request.json:
        console.as_json(_describe_outcome(request, outcome, plan))


def _describe_finish(finish: Distillation) -> str:
    """Describe how the finish changed the divergence on the text that it kept back."""
    if not finish.best:
        return f"no better on the text kept back, in {finish.steps} steps: nothing changed"
    before, after = 1e3 * finish.before, 1e3 * finish.after
    return f"KL {before:.1f} → {after:.1f} millinats on the text kept back, at step {finish.best}"


def _describe_outcome(request: Request, outcome: Outcome, plan: RunPlan | None) -> dict[str, Any]:
    """Return the figures of a finished run as plain JSON types."""
    from quark.torch.export.containers.base import get_container
    from quark.torch.export.recognition import read_contents
    from quark.torch.pipeline.machine import peak_memory

    data: dict[str, Any] = {"quark": __version__, "output": str(request.output_dir)}
    if request.exports:
        data["bytes"] = models.weight_bytes(request.output_dir)
        data["original_bytes"] = models.weight_bytes(request.model_dir)
    if any(get_container(name).is_read for name in request.exports):
        summary = read_contents(request.output_dir).summary
        data |= {"layers": len(summary.layers), "bits_per_weight": summary.bits_per_weight}
    data |= {
        "float_layers": outcome.left,
        "quantizing_seconds": outcome.seconds,
        "seconds": time.monotonic() - outcome.start,
        "peak_memory": peak_memory(),
        "plan": None if plan is None else plan.to_dict(),
        "finish": None if outcome.finish is None else asdict(outcome.finish),
        "original_perplexity": None,
        "calibration_scripts": outcome.coverage.calibration,
        "evaluation_scripts": outcome.coverage.evaluation,
    }
    if outcome.after is None or outcome.predictions is None:
        return data
    found = outcome.predictions
    data |= {"original_perplexity": found.original, "change_error": found.change_error}
    return data | outcome.after.to_dict()


def _compare(request: Request, outcome: Outcome, plan: RunPlan) -> dict[str, str]:
    """Return memory, disk and time as they were planned and as they came out."""
    from quark.torch.pipeline.machine import peak_memory

    size, peak = console.format_bytes, peak_memory()
    rows = {}
    if peak is not None:
        rows["memory"] = f"{size(peak)}  (planned {size(plan.requirements.memory)})"
    if request.exports:
        written = models.weight_bytes(request.output_dir)
        rows["disk"] = f"{size(written)}  (planned {size(plan.requirements.output)})"
    seconds = console.format_seconds(time.monotonic() - outcome.start)
    rows["time"] = f"{seconds}  (planned {console.format_seconds(plan.seconds)})"
    return rows
