"""What ``quark quantize`` says before and after its work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark import __version__
from quark.cli import console, models
from quark.cli.configs import needs_data
from quark.cli.options import EVAL_WINDOWS, GGUF_NAME
from quark.cli.request import Request

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config


@dataclass
class Outcome:
    """What is told in the end."""

    linears: int
    seconds: float
    shared: int
    before: float | None = None
    after: float | None = None


def show_plan(request: Request, config: Config, described: dict[str, Any], length: int) -> None:
    """Say what will be done."""
    from quark.torch.report.summary import describe, describe_layer

    size = console.in_bytes(models.weight_bytes(request.model_dir))
    kind = described.get("model_type", "unknown type")
    main = describe_layer(config.global_quant_config)
    rows = {"model": f"{request.model_dir}  ({kind}, {size})"}
    rows["scheme"] = str(request.quant_scheme or request.config)
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
        if needs_data(config)
        else "none needed: no static ranges of activations"
    )
    rows["evaluation"] = (
        ""
        if request.skip_evaluation
        else f"up to {request.num_eval_data or EVAL_WINDOWS} windows of {length} tokens: "
        + (request.eval_data or f"held-out {models.EMBEDDED}")
    )
    layout = "" if request.custom_mode == "quark" else f" as {request.custom_mode}"
    how = f"{request.model_export}{layout}, {request.export_weight_format}"
    rows["output"] = f"{request.output_dir}  ({how})"
    console.out.print(f"\n[bold]quark {__version__}[/] quantize")
    console.out.print(console.facts({k: escape(v) for k, v in rows.items() if v}))
    console.out.print()


def show_outcome(request: Request, outcome: Outcome) -> None:
    """Say what came of it, and how to load it."""
    before = models.weight_bytes(request.model_dir)
    after = models.weight_bytes(request.output_dir)
    rows = {}
    if request.model_export != "gguf" and request.custom_mode == "quark":
        summary, _ = models.read_summary(request.output_dir)
        left = outcome.linears - len(summary.layers)
        rows["layers"] = f"{len(summary.layers)} quantized, {left} left alone"
        rows["bits per weight"] = console.in_bits(summary.bits_per_weight)
    share = f"{100 * after / before:.0f} %"
    rows["size on disk"] = f"{console.in_bytes(before)} → {console.in_bytes(after)} ({share})"
    rows["calibration"] = f"{outcome.seconds:.1f} s"
    if outcome.shared:
        rows["shared scales"] = f"{outcome.shared} groups of layers"
    if outcome.before is not None and outcome.after is not None:
        change = console.in_percent(outcome.after, outcome.before)
        rows["perplexity"] = f"{outcome.before:.2f} → {outcome.after:.2f} ({change})"
    console.out.print("", console.facts(rows), "\n  Load it:\n", sep="\n")
    where = json.dumps(str(request.output_dir))
    if request.model_export == "gguf":
        file = json.dumps(str(request.output_dir / f"{GGUF_NAME}.gguf"))
        console.show_code(f"model = llama_cpp.Llama(model_path={file})")
    elif request.model_export == "quark_format":
        line = f"quark.torch.ModelImporter({where}).import_model_info(model)"
        console.show_code(f"model = {line}  # model: the architecture, empty")
    else:
        console.show_code(f"model = transformers.AutoModelForCausalLM.from_pretrained({where})")
    console.out.print()
