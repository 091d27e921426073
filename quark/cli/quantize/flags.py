"""The flags of ``quark quantize``: a field each, in panels as the help shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from quark.cli.models import EMBEDDED
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    ChatTemplate,
    DataTypeFlag,
    DeviceFlag,
    IncludePath,
    ModelExport,
    NumFewshot,
    Tasks,
    TrustRemoteCode,
    Verbose,
    panel,
)

_model, _scheme, _algorithm = panel("Model"), panel("What is quantized how"), panel("Algorithms")
_data, _output, _evaluation = panel("Calibration"), panel("Output"), panel("Evaluation")
_reload = panel("Instead of quantizing")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Which model, and how it is loaded."""

    model_dir: Annotated[
        Path,
        _model(
            metavar="DIR",
            help="Directory of the model to quantize, or OWNER/NAME on the Hugging Face Hub.",
        ),
    ]
    revision: Annotated[
        str | None, _model(metavar="NAME", help="Version of a model of the Hub.")
    ] = None
    data_type: DataTypeFlag = "auto"
    device: DeviceFlag = "auto"
    model_attn_implementation: Annotated[
        Literal["eager", "sdpa", "flash_attention_2"] | None,
        _model(metavar="NAME", help="How attention is computed: eager, sdpa, flash_attention_2."),
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass(frozen=True, kw_only=True)
class SchemeFlags:
    """What is quantized how."""

    quant_scheme: Annotated[
        str | None, _scheme(metavar="NAME", help="Scheme of all layers; see 'quark schemes'.")
    ] = None
    recipe: Annotated[
        str | None,
        _scheme(
            metavar="NAME",
            help="Instead: a scheme together with algorithms, such as w4; see 'quark recipes'.",
        ),
    ] = None
    config: Annotated[
        Path | None,
        _scheme(
            metavar="FILE",
            help="A Config as JSON (what Config.to_dict returns), instead of a scheme.",
        ),
    ] = None
    group_size: Annotated[
        int | None,
        _scheme(
            metavar="N",
            min=-1,
            help="Weights of a group: 128, for schemes whose name does not say it; -1 for rows.",
        ),
    ] = None
    group_size_per_layer: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN N",
            help="Another group size for layers whose name matches; repeatable.",
        ),
    ] = None
    scale_format: Annotated[
        Literal["e4m3", "float32"] | None,
        _scheme(metavar="TYPE", help="Type of the scales of fp4 and fp6 groups: e4m3 or float32."),
    ] = None
    scale_calculation_mode: Annotated[
        Literal["even", "floor", "ceil"] | None,
        _scheme(metavar="MODE", help="Rounding of shared exponents (MX): even, floor or ceil."),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _scheme(
            metavar="NAME",
            help="Quantize the key-value cache too, by fp8 or another scheme of 'quark schemes' "
            "(--kv_cache_quant_scheme is the same).",
        ),
    ] = None
    min_kv_scale: Annotated[
        float | None, _scheme(metavar="X", min=0.0, help="Smallest scale of that cache.")
    ] = None
    kv_cache_post_rope: Annotated[
        bool, _scheme(help="Quantize keys of that cache after rotary embedding, not before.")
    ] = False
    layer_quant_scheme: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN SCHEME",
            help="Another scheme for layers whose name matches; repeatable, the first match "
            "counts.",
        ),
    ] = None
    exclude_layers: Annotated[
        list[str] | None,
        _scheme(
            metavar="PATTERN …",
            help="Layers to leave alone, instead of the output head; without a value, none.",
        ),
    ] = None
    weight_matrix_merge: Annotated[
        bool,
        _scheme(
            help="Let layers that read the same input (query, key, value; gate, up) share "
            "per-tensor scales, as software that fuses them expects.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class AlgorithmFlags:
    """What prepares or replaces rounding to the nearest code."""

    pre_quantization_optimization: Annotated[
        list[str] | None,
        _algorithm(
            metavar="NAME,…",
            help="What precedes the algorithms of --quant_algo: rotation, quarot, smoothquant; "
            "repeatable.",
        ),
    ] = None
    quant_algo: Annotated[
        list[str] | None,
        _algorithm(
            metavar="NAME,…",
            help="Algorithms in order: smoothquant, autosmoothquant, awq, gptq, gptaq, qronos, "
            "yaqa, autoround, rotation, quarot.",
        ),
    ] = None
    quant_algo_config_file: Annotated[
        list[str] | None,
        _algorithm(
            metavar="[NAME] FILE",
            help="Options of one of these as JSON, by its fields; without the name, the file has "
            "it as 'name'. Repeatable (--quant_algo_config_file_path and "
            "--pre_optimization_config_file_path are the same).",
        ),
    ] = None
    statistics: Annotated[
        Path | None,
        _algorithm(
            metavar="DIR",
            help="What 'quark collect' wrote: awq or gptq, and static ranges of activations, take "
            "it instead of running data.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CalibrationFlags:
    """Text that static ranges and algorithms look at."""

    dataset: Annotated[
        str | None,
        _data(
            metavar="FILE|NAME",
            help="Text to calibrate on: a .txt, .jsonl, .json, .csv or .parquet file, a "
            "directory, pileval, wikitext, cnn_dailymail, or another dataset of the Hub. Without "
            f"it: {EMBEDDED}.",
        ),
    ] = None
    num_calib_data: Annotated[int, _data(metavar="N", min=1, help="Most windows of that text.")] = (
        128
    )
    seq_len: Annotated[
        int | None,
        _data(
            metavar="N",
            min=2,
            help=f"Tokens of a window: {SEQ_LEN}, or what the model takes if that is less.",
        ),
    ] = None
    batch_size: Annotated[int, _data(metavar="N", min=1, help="Windows that run together.")] = 1


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is written."""

    output_dir: Annotated[Path, _output(metavar="DIR", help="Directory to write.")] = Path(
        "exported_model"
    )
    model_export: Annotated[
        list[ModelExport],
        _output(
            metavar="FORMAT",
            help="hf_format (safetensors), quark_format (the native format), gguf (for llama.cpp) "
            "or onnx (for ONNX Runtime); repeatable.",
        ),
    ] = (ModelExport.hf_format,)  # type: ignore[assignment]
    custom_mode: Annotated[
        Literal["quark", "awq", "gptq", "compressed-tensors", "fp8"],
        _output(
            metavar="NAME",
            help="Tool whose layout is written: quark, awq, gptq, compressed-tensors or fp8.",
        ),
    ] = "quark"
    export_weight_format: Annotated[
        Literal["real_quantized", "fake_quantized"],
        _output(
            metavar="FORMAT",
            help="real_quantized (packed codes) or fake_quantized (floats that hold their values).",
        ),
    ] = "real_quantized"
    pack_method: Annotated[
        Literal["reorder", "order"],
        _output(
            metavar="ORDER",
            help="How 4-bit codes lie in a word: reorder (interleaved) or order.",
        ),
    ] = "reorder"
    params_save: Annotated[
        bool, _output(help="Also write the parameters and a description of the structure.")
    ] = False
    save_dir: Annotated[Path, _output(metavar="DIR", help="Directory of --params_save.")] = Path(
        "model_params"
    )
    verify: Annotated[
        bool,
        _output(
            help="Open the result with the tool it is for, where that is installed, and compare "
            "predictions before it takes its place."
        ),
    ] = False
    overwrite: Annotated[
        bool, _output(help="Replace the output directory, once all went well.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """What is measured."""

    skip_evaluation: Annotated[bool, _evaluation(help="Measure nothing.")] = False
    eval_data: Annotated[
        str | None,
        _evaluation(
            metavar="FILE|NAME",
            help="Text to measure perplexity on, as for --dataset; held-out otherwise "
            "(--evaluation_dataset and --eval_data_dir are the same).",
        ),
    ] = None
    num_eval_data: Annotated[
        int | None,
        _evaluation(
            metavar="N",
            min=-1,
            help=f"Most windows of it ({EVAL_WINDOWS}) and questions of a task (all); -1 for all.",
        ),
    ] = None
    eval_seq_len: Annotated[
        int | None, _evaluation(metavar="N", min=2, help="Tokens of its windows: as --seq_len.")
    ] = None
    tasks: Tasks = None
    include_path: IncludePath = None
    num_fewshot: NumFewshot = None
    apply_chat_template: ChatTemplate = False
    eval_batch_size: Annotated[
        str,
        _evaluation(
            metavar="N|auto[:N]",
            help="What runs together: windows, or questions of a task, for which auto tries.",
        ),
    ] = "8"
    max_eval_batch_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Most that auto tries.")
    ] = 64
    use_ppl_eval_for_kv_cache: Annotated[
        bool,
        _evaluation(help="Measure perplexity on tokens after a long context, as a cache holds it."),
    ] = False
    ppl_eval_for_kv_cache_context_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Tokens of that context.")
    ] = 1024
    ppl_eval_for_kv_cache_sample_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Tokens measured after it.")
    ] = 512
    ppl_eval_for_kv_cache_patch_size: Annotated[
        int | None, _evaluation(metavar="N", min=1, help="Most of these contexts: all.")
    ] = None
    save_metrics_to_csv: Annotated[
        bool, _evaluation(help="Write what was measured to a file evaluation_metrics.csv.")
    ] = False
    metrics_output_dir: Annotated[
        Path, _evaluation(metavar="DIR", help="Directory of that file.")
    ] = Path("metrics_output_dir")


@dataclass(frozen=True, kw_only=True)
class ReloadFlags:
    """What is measured or exported without being quantized here."""

    skip_quantization: Annotated[bool, _reload(help="Only measure the model as it is.")] = False
    model_reload: Annotated[
        bool, _reload(help="Take a quantized model from --import_model_dir, or --output_dir.")
    ] = False
    import_model_dir: Annotated[
        Path | None, _reload(metavar="DIR", help="Directory that it was exported to.")
    ] = None
    params_load: Annotated[
        bool, _reload(help="Take a quantized model from what --params_save wrote.")
    ] = False
    json_path: Annotated[Path | None, _reload(metavar="FILE", help="Its description.")] = None
    safetensors_path: Annotated[Path | None, _reload(metavar="FILE", help="Its parameters.")] = None
    verbose: Verbose = False
