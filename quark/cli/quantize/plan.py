"""What ``quark quantize`` says before and after its work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark import __version__
from quark.cli import console, models
from quark.cli.metrics import Figures
from quark.cli.options import GGUF_NAME, ONNX_NAME
from quark.cli.quantize.config import needs_data
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from quark.torch.export.checks import ExpertTokens
    from quark.torch.quantization.config.config import Config


@dataclass
class Outcome:
    """What is told in the end."""

    shared: int
    left: int = 0  # layers in float
    seconds: float = 0.0
    before: float | None = None
    after: Figures | None = None
    experts: ExpertTokens | None = None


def show_plan(request: Request, config: Config, described: dict[str, Any], length: int) -> None:
    """Say what will be done."""
    from quark.torch.report.summary import describe, describe_layer

    size = console.in_bytes(models.weight_bytes(request.model_dir))
    kind = described.get("model_type", "unknown type")
    main = describe_layer(config.global_quant_config)
    rows = {"model": f"{request.model_dir}  ({kind}, {size})"}
    rows["scheme"] = str(request.quant_scheme or request.recipe or request.config)
    rows |= {"  weights": main.weight, "  inputs": main.input, "  outputs": main.output}
    cache = next(iter(config.kv_cache_quant_config.values()), None)
    rows["  cache"] = "" if cache is None else describe(cache.output_tensors)
    for pattern, scheme in request.layer_schemes:
        rows[f"  {pattern}"] = scheme
    rows["algorithms"] = ", ".join(options.name for options in config.algo_config or [])
    head = request.config is None and request.exclude_layers is None
    rows["left alone"] = "the output head" if head else ", ".join(config.exclude) or "nothing"
    source = request.dataset or models.EMBEDDED
    rows["calibration"] = (
        f"up to {request.num_calib_data} windows of {length} tokens: {source}"
        if needs_data(config, request.statistics is not None)
        else "none needed: "
        + ("statistics tell" if request.statistics else "no static ranges of activations")
    )
    if not request.skip_evaluation:
        text = request.eval_data or f"held-out {models.EMBEDDED}"
        rows["evaluation"] = f"perplexity on {text}"
        rows["  tasks"] = request.tasks or ""
    layout = "" if request.custom_mode == "quark" else f" as {request.custom_mode}"
    how = f"{', '.join(request.exports)}{layout}, {request.export_weight_format}"
    rows["output"] = (
        f"{request.output_dir}  ({how})"
        if request.exports
        else "no checkpoint: --model_export hf_format writes one"
    )
    console.out.print(f"\n[bold]quark {__version__}[/] quantize")
    console.out.print(console.facts({k: escape(v) for k, v in rows.items() if v}))
    console.out.print()


def show_outcome(request: Request, outcome: Outcome) -> None:
    """Say what came of it, and how to load it."""
    formats = request.exports
    rows = {}
    if {"hf_format", "quark_format"} & set(formats) and request.custom_mode == "quark":
        summary, _ = models.read_summary(request.output_dir)
        rows["layers"] = f"{len(summary.layers)} quantized, {outcome.left} left alone"
        rows["bits per weight"] = console.in_bits(summary.bits_per_weight)
    if formats:
        before = models.weight_bytes(request.model_dir)
        after = models.weight_bytes(request.output_dir)
        share = f"{100 * after / before:.0f} %"
        rows["size on disk"] = f"{console.in_bytes(before)} → {console.in_bytes(after)} ({share})"
    rows["calibration"] = f"{outcome.seconds:.1f} s"
    if outcome.experts is not None:
        rows["tokens per expert"] = str(outcome.experts)
    if outcome.shared:
        rows["shared scales"] = f"{outcome.shared} groups of layers"
    if outcome.before is not None and outcome.after is not None:
        found = outcome.after.perplexity
        change = console.in_percent(found, outcome.before)
        rows["perplexity"] = f"{outcome.before:.2f} → {found:.2f} ({change})"
    console.out.print("", console.facts(rows), sep="\n")
    if formats:
        console.out.print("\n  Load it:\n")
        for name in formats:
            console.show_code(_loading(name, request.output_dir))
    console.out.print()


def _loading(name: str, directory: Path) -> str:
    """Return the line that loads what was written in a format."""
    where = json.dumps(str(directory))
    if name == "gguf":
        file = json.dumps(str(directory / f"{GGUF_NAME}.gguf"))
        return f"model = llama_cpp.Llama(model_path={file})"
    if name == "onnx":
        file = json.dumps(str(directory / ONNX_NAME))
        return f"session = onnxruntime.InferenceSession({file})"
    if name == "quark_format":
        line = f"quark.torch.ModelImporter({where}).import_model_info(model)"
        return f"model = {line}  # model: the architecture, empty"
    return f"model = transformers.AutoModelForCausalLM.from_pretrained({where})"
