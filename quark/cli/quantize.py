"""``quark quantize``: the flags and their help; ``job`` does the work."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quark.cli.models import EMBEDDED
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    CustomMode,
    DataType,
    DataTypeFlag,
    Device,
    DeviceFlag,
    ManyValues,
    ModelExport,
    PackMethod,
    TrustRemoteCode,
    Verbose,
    WeightFormat,
    panel,
)
from quark.cli.request import Request

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

_model, _scheme = panel("Model"), panel("What is quantized how")
_algorithm = panel("Algorithms")
_data, _output, _evaluation = panel("Calibration"), panel("Output"), panel("Evaluation")


class _Command(ManyValues):
    many = ("exclude_layers", "layer_quant_scheme", "quant_algo_config_file")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("quantize", cls=_Command, help=HELP)(quantize)


ModelDir = Annotated[
    Path, _model("--model_dir", metavar="DIR", help="Directory of the model to quantize.")
]
OutputDir = Annotated[Path, _output("--output_dir", metavar="DIR", help="Directory to write.")]
QuantScheme = Annotated[
    str | None,
    _scheme("--quant_scheme", metavar="NAME", help="Scheme of all layers; see 'quark schemes'."),
]
ConfigFile = Annotated[
    Path | None,
    _scheme(
        "--config",
        metavar="FILE",
        help="A Config as JSON (what Config.to_dict returns), instead of a scheme.",
    ),
]
GroupSize = Annotated[
    int | None,
    _scheme(
        "--group_size",
        metavar="N",
        min=1,
        help="Weights of a group: 128, for schemes whose name does not say it.",
    ),
]
KvCacheDtype = Annotated[
    str | None,
    _scheme(
        "--kv_cache_dtype",
        metavar="NAME",
        help="Quantize the key-value cache too, by fp8 or another scheme of 'quark schemes' "
        "(--kv_cache_quant_scheme is the same).",
    ),
]
MinKvScale = Annotated[
    float | None,
    _scheme("--min_kv_scale", metavar="X", min=0.0, help="Smallest scale of that cache."),
]
LayerQuantScheme = Annotated[
    list[str] | None,
    _scheme(
        "--layer_quant_scheme",
        metavar="PATTERN SCHEME",
        help="Another scheme for layers whose name matches; repeatable, the first match counts.",
    ),
]
ExcludeLayers = Annotated[
    list[str] | None,
    _scheme(
        "--exclude_layers",
        metavar="PATTERN …",
        help="Layers to leave alone, instead of the output head; without a value, none.",
    ),
]
WeightMatrixMerge = Annotated[
    bool,
    _scheme(
        "--weight_matrix_merge",
        help="Let layers that read the same input (query, key, value; gate, up) share per-tensor "
        "scales, as software that fuses them expects.",
    ),
]
PreOptimization = Annotated[
    list[str] | None,
    _algorithm(
        "--pre_quantization_optimization",
        metavar="NAME,…",
        help="What precedes the algorithms of --quant_algo: rotation, quarot, smoothquant; "
        "repeatable.",
    ),
]
QuantAlgo = Annotated[
    list[str] | None,
    _algorithm(
        "--quant_algo",
        metavar="NAME,…",
        help="Algorithms in order: smoothquant, autosmoothquant, awq, gptq, rotation, quarot.",
    ),
]
AlgoConfigFile = Annotated[
    list[str] | None,
    _algorithm(
        "--quant_algo_config_file",
        metavar="[NAME] FILE",
        help="Options of one of these as JSON, by its fields; without the name, the file has it "
        "as 'name'. Repeatable (--quant_algo_config_file_path and "
        "--pre_optimization_config_file_path are the same).",
    ),
]
Dataset = Annotated[
    str | None,
    _data(
        "--dataset",
        metavar="FILE",
        help="Text that algorithms and static ranges look at: a .txt, .jsonl, .json, .csv or "
        f".parquet file, or the name of a dataset. Without it: {EMBEDDED}.",
    ),
]
NumCalibData = Annotated[
    int, _data("--num_calib_data", metavar="N", min=1, help="Most windows of that text.")
]
SeqLen = Annotated[
    int | None,
    _data(
        "--seq_len",
        metavar="N",
        min=2,
        help=f"Tokens of a window: {SEQ_LEN}, or what the model takes if that is less.",
    ),
]
BatchSize = Annotated[
    int, _data("--batch_size", metavar="N", min=1, help="Windows that run together.")
]
ModelExportFlag = Annotated[
    ModelExport,
    _output(
        "--model_export",
        metavar="FORMAT",
        help="hf_format (safetensors), quark_format (the native format) or gguf (for llama.cpp).",
    ),
]
CustomModeFlag = Annotated[
    CustomMode,
    _output(
        "--custom_mode",
        metavar="NAME",
        help="Tool whose layout is written: quark, awq, gptq, compressed-tensors or fp8.",
    ),
]
WeightFormatFlag = Annotated[
    WeightFormat,
    _output(
        "--export_weight_format",
        metavar="FORMAT",
        help="real_quantized (packed codes) or fake_quantized (floats that hold their values).",
    ),
]
PackMethodFlag = Annotated[
    PackMethod,
    _output(
        "--pack_method",
        metavar="ORDER",
        help="How 4-bit codes lie in a word: reorder (interleaved) or order.",
    ),
]
Overwrite = Annotated[
    bool, _output("--overwrite", help="Replace the output directory, once all went well.")
]
SkipEvaluation = Annotated[
    bool, _evaluation("--skip_evaluation", help="Do not measure the perplexity before and after.")
]
EvalData = Annotated[
    str | None,
    _evaluation(
        "--eval_data",
        metavar="FILE",
        help="Text to measure it on, as for --dataset; held-out otherwise.",
    ),
]
NumEvalData = Annotated[
    int | None,
    _evaluation("--num_eval_data", metavar="N", min=1, help=f"Most windows of it: {EVAL_WINDOWS}."),
]


def quantize(
    model_dir: ModelDir,
    quant_scheme: QuantScheme = None,
    output_dir: OutputDir = Path("exported_model"),
    config: ConfigFile = None,
    group_size: GroupSize = None,
    kv_cache_dtype: KvCacheDtype = None,
    min_kv_scale: MinKvScale = None,
    layer_quant_scheme: LayerQuantScheme = None,
    exclude_layers: ExcludeLayers = None,
    weight_matrix_merge: WeightMatrixMerge = False,
    pre_quantization_optimization: PreOptimization = None,
    quant_algo: QuantAlgo = None,
    quant_algo_config_file: AlgoConfigFile = None,
    dataset: Dataset = None,
    num_calib_data: NumCalibData = 128,
    seq_len: SeqLen = None,
    batch_size: BatchSize = 1,
    data_type: DataTypeFlag = DataType.auto,
    device: DeviceFlag = Device.auto,
    trust_remote_code: TrustRemoteCode = False,
    model_export: ModelExportFlag = ModelExport.hf_format,
    custom_mode: CustomModeFlag = CustomMode.quark,
    export_weight_format: WeightFormatFlag = WeightFormat.real_quantized,
    pack_method: PackMethodFlag = PackMethod.reorder,
    overwrite: Overwrite = False,
    skip_evaluation: SkipEvaluation = False,
    eval_data: EvalData = None,
    num_eval_data: NumEvalData = None,
    verbose: Verbose = False,
) -> None:
    """Check what was asked for, then do it and say what came of it."""
    given = {k: v.value if isinstance(v, Enum) else v for k, v in locals().items()}
    del given["verbose"]
    from quark.cli.job import run

    run(Request(**given))
