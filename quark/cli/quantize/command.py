"""``quark quantize``: the flags and their help; ``job`` does the work."""

from __future__ import annotations

import typer

from quark.cli.options import ManyValues, verb
from quark.cli.quantize.request import Request

HELP = """
Quantize a model and write it so that Transformers, vLLM and this package load it.

The scheme says how: [cyan]int4_wo_128[/cyan] is 4-bit integer weights in groups of 128,
[cyan]fp8[/cyan] 8-bit floats for weights and activations. [cyan]quark schemes[/cyan] lists all.
The output head stays as it is unless [cyan]--exclude_layers[/cyan] says otherwise.

[bold]Examples[/bold]

  4-bit weights, a quarter of the size of 16 bits:

    [cyan]quark quantize --model_dir llama --output_dir llama-int4 \\
      --quant_scheme int4_wo_128[/cyan]

  8-bit floats with the key-value cache in 8 bits too, calibrated on text of your own:

    [cyan]quark quantize --model_dir llama --output_dir llama-fp8 \\
      --quant_scheme fp8 --kv_cache_dtype fp8 --dataset my.txt \\
      --weight_matrix_merge[/cyan]

  4-bit weights, rounded with regard to the activations that meet them:

    [cyan]quark quantize --model_dir llama --output_dir llama-awq \\
      --quant_scheme uint4_wo_128 --quant_algo awq[/cyan]

  4 bits, but 8 for the layers that matter most, and all layers but one block:

    [cyan]quark quantize --model_dir llama --output_dir mixed \\
      --quant_scheme int4_wo_64 --layer_quant_scheme "*down_proj" int8_wo \\
      --exclude_layers lm_head "*.layers.0.*"[/cyan]

Flags can be written with dashes as well ([cyan]--model-dir[/cyan]).
"""


class _Command(ManyValues):
    many = (
        "exclude_layers",
        "group_size_per_layer",
        "layer_quant_scheme",
        "multi_gpu",
        "quant_algo_config_file",
    )


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("quantize", cls=_Command, help=HELP)(verb(Request, _quantize))


def _quantize(request: Request) -> None:
    from quark.cli.quantize.job import run

    run(request)
