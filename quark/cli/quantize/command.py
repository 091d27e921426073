"""The command ``quark quantize`` and its help; ``job`` runs it."""

from __future__ import annotations

import typer

from quark.cli.hub import upload
from quark.cli.options import ManyValues, add_verb, verb
from quark.cli.process_group import process_group, rank
from quark.cli.quantize.request import Request

HELP = """
Quantize a model and write a checkpoint for Transformers, vLLM and this package.

The scheme names the formats: [cyan]int4_wo_128[/cyan] is 4-bit integer weights in groups of 128,
[cyan]fp8[/cyan] is 8-bit floats for weights and activations. [cyan]quark schemes[/cyan] lists all.
The output head stays in float unless [cyan]--exclude_layers[/cyan] is given.

[bold]Examples[/bold]

  4-bit weights, a quarter of the size of 16-bit weights:

    [cyan]quark quantize --model_dir llama --output_dir llama-int4 \\
      --quant_scheme int4_wo_128[/cyan]

  8-bit floats with an 8-bit key-value cache, calibrated on your own text:

    [cyan]quark quantize --model_dir llama --output_dir llama-fp8 \\
      --quant_scheme fp8 --kv_cache_dtype fp8 --dataset my.txt \\
      --weight_matrix_merge[/cyan]

  4-bit weights, scaled by AWQ according to the activations:

    [cyan]quark quantize --model_dir llama --output_dir llama-awq \\
      --quant_scheme uint4_wo_128 --quant_algo awq[/cyan]

  4-bit weights, 8-bit weights for some layers, and one block in float:

    [cyan]quark quantize --model_dir llama --output_dir mixed \\
      --quant_scheme int4_wo_64 --layer_quant_scheme "*down_proj" int8_wo \\
      --exclude_layers lm_head "*.layers.0.*"[/cyan]

  The same with two processes, which give the same bits:

    [cyan]torchrun --nproc_per_node 2 -m quark quantize --model_dir llama …[/cyan]

Flags may be written with dashes ([cyan]--model-dir[/cyan]).
"""


class _Command(ManyValues):
    many = (
        "exclude_layers",
        "group_size_per_layer",
        "include_parts",
        "layer_quant_scheme",
        "multi_gpu",
        "quant_algo_config_file",
    )


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "quantize", verb(Request, _quantize), HELP, _Command)


def _quantize(request: Request) -> None:
    from quark.cli.quantize.job import run

    with process_group(request.device):
        run(request)
        if request.push_to_hub is not None and not request.plan and rank() == 0:
            upload(request.output_dir, request.push_to_hub, request.private)
