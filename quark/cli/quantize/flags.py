"""The flags of ``quark quantize``: one field each, grouped by the panels of the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from quark.cli.models import CALIBRATION, EVALUATION
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    AllExperts,
    ChatTemplate,
    CheckDigests,
    DataTypeFlag,
    DeviceFlag,
    IncludePath,
    Json,
    MaxMemory,
    NumFewshot,
    PlanOnly,
    Tasks,
    TrustRemoteCode,
    complete,
    in_words,
    one_of,
    panel,
)
from quark.cli.other_names import FILES, LAYOUTS
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.export.containers.registry import CONTAINERS, SAFETENSORS
from quark.torch.export.formats.registry import FORMATS
from quark.torch.quantization.config.export import PACK_METHODS, WEIGHT_FORMATS

QUANT_FLOWS = ("standard", "file2file", "per_block")

_model, _scheme, _algorithm = panel("Model"), panel("Scheme"), panel("Algorithms")
_data, _output, _evaluation = panel("Calibration"), panel("Output"), panel("Evaluation")


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model and how to load it."""

    model_dir: Annotated[
        Path,
        _model(
            metavar="DIR",
            help="Directory of the model to quantize, OWNER/NAME on the Hugging Face Hub, a GGUF "
            "file, a graph (.pt2), or a Python function that builds a model (module:function).",
        ),
    ]
    revision: Annotated[
        str | None, _model(metavar="NAME", help="Revision of a model on the Hub.")
    ] = None
    data_type: DataTypeFlag = "auto"
    device: DeviceFlag = "auto"
    max_memory: MaxMemory = None
    model_attn_implementation: Annotated[
        Literal["eager", "sdpa", "flash_attention_2"] | None,
        _model(
            metavar="NAME", help="Implementation of attention: eager, sdpa or flash_attention_2."
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    check_digests: CheckDigests = False


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """How the work is done, and what is printed."""

    plan: PlanOnly = False
    json: Json = False
    quant_flow: Annotated[
        str | None,
        _model(
            metavar="NAME",
            **one_of("--quant_flow", QUANT_FLOWS.__iter__),
            help="standard loads the model; file2file reads and writes its tensors one by one "
            "(the default where weights alone decide, with --skip_evaluation).",
        ),
    ] = None
    file2file_quantization: Annotated[
        bool, typer.Option(help="The same as --quant_flow file2file.", hidden=True)
    ] = False


@dataclass(frozen=True, kw_only=True)
class AlgorithmFlags:
    """Algorithms that transform weights, or round them better than to the nearest."""

    pre_quantization_optimization: Annotated[
        list[str] | None,
        _algorithm(
            metavar="NAME,…",
            help="Algorithms to apply before those of --quant_algo, such as rotation or "
            "smoothquant; repeatable.",
        ),
    ] = None
    quant_algo: Annotated[
        list[str] | None,
        _algorithm(
            metavar="NAME,…",
            autocompletion=complete(ALGORITHMS.keys),
            help=f"Algorithms to apply, in order: {', '.join(ALGORITHMS)}.",
        ),
    ] = None
    quant_algo_config_file: Annotated[
        list[str] | None,
        _algorithm(
            metavar="[NAME] FILE",
            help="JSON file with the options of one algorithm. Without NAME, the file names it in "
            "'name'. Repeatable. Aliases: --quant_algo_config_file_path, "
            "--pre_optimization_config_file_path.",
        ),
    ] = None
    finish: Annotated[
        Literal["distill"] | None,
        _algorithm(
            metavar="NAME",
            help="Work after quantization: distill trains scales, norms and biases against the "
            "predictions of the original, on the calibration data.",
        ),
    ] = None
    finish_config_file: Annotated[
        Path | None,
        _algorithm(metavar="FILE", help="JSON file with the options of the finish, such as steps."),
    ] = None
    statistics: Annotated[
        Path | None,
        _algorithm(
            metavar="DIR",
            help="Statistics from 'quark collect', instead of calibration data. For awq, gptq and "
            "static activation scales.",
        ),
    ] = None
    moe_calibrate_all_experts: AllExperts = False


@dataclass(frozen=True, kw_only=True)
class CalibrationFlags:
    """Calibration data."""

    dataset: Annotated[
        str | None,
        _data(
            metavar="FILE|NAME",
            help="Calibration text: a .txt, .md, .jsonl, .json, .csv or .parquet file, a "
            "directory, pileval, wikitext, cnn_dailymail, or another dataset on the Hub. For "
            "models of images or audio ('quark quantize'): a directory of images, of audio, or a "
            f".jsonl of messages. Default: {CALIBRATION}.",
        ),
    ] = None
    num_calib_data: Annotated[
        int, _data(metavar="N", min=1, help="Maximum number of calibration windows or samples.")
    ] = 128
    seq_len: Annotated[
        int | None,
        _data(
            metavar="N",
            min=2,
            help=f"Tokens per window (default {SEQ_LEN}, or the maximum length of the model if "
            "that is less).",
        ),
    ] = None
    batch_size: Annotated[int, _data(metavar="N", min=1, help="Windows per calibration batch.")] = 1
    offload_dir: Annotated[
        Path | None,
        _data(
            metavar="DIR",
            help="Directory for activations that do not fit into memory (default: that of "
            "temporary files).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """The output."""

    output_dir: Annotated[Path, _output(metavar="DIR", help="Output directory.")] = Path(
        "exported_model"
    )
    model_export: Annotated[
        list[str],
        _output(
            metavar="FORMAT",
            **one_of("--model_export", CONTAINERS.keys, {"--custom_mode": FORMATS}, FILES),
            help=f"Kind of files: {in_words(CONTAINERS)}; hf_format is safetensors, quark_format "
            "the native format. Repeatable.",
        ),
    ] = (SAFETENSORS,)  # type: ignore[assignment]
    custom_mode: Annotated[
        str,
        _output(
            metavar="NAME",
            **one_of("--custom_mode", FORMATS.keys, {"--model_export": CONTAINERS}, LAYOUTS),
            help=f"Tool whose layout is written: {in_words(FORMATS)}.",
        ),
    ] = "quark"
    export_weight_format: Annotated[
        str,
        _output(
            metavar="FORMAT",
            **one_of("--export_weight_format", WEIGHT_FORMATS.__iter__),
            help=f"{in_words(WEIGHT_FORMATS)}: packed codes, or dequantized floats.",
        ),
    ] = WEIGHT_FORMATS[0]
    pack_method: Annotated[
        str,
        _output(
            metavar="ORDER",
            **one_of("--pack_method", PACK_METHODS.__iter__),
            help=f"Order of 4-bit codes in a 32-bit word: {in_words(PACK_METHODS)} (reorder "
            "interleaves them).",
        ),
    ] = PACK_METHODS[0]
    no_keep_prequantized_layers: Annotated[
        bool,
        _output(
            help="Write layers that stay in float as floats where the model is quantized already. "
            "By default they keep its codes and scales, in the layout of quark."
        ),
    ] = False
    use_cache: Annotated[
        bool,
        _output(
            help="Keys and values of earlier tokens are inputs and outputs of the ONNX file, so "
            "that generation computes each token once."
        ),
    ] = False
    params_save: Annotated[
        bool, _output(help="Also write the parameters and the module structure (save_params).")
    ] = False
    save_dir: Annotated[Path, _output(metavar="DIR", help="Output directory of --params_save.")] = (
        Path("model_params")
    )
    verify: Annotated[
        bool,
        _output(
            help="Open the checkpoint with the software it is for, if installed, and compare "
            "predictions before the output directory is replaced. Otherwise this package opens it, "
            "and a warning says why."
        ),
    ] = False
    overwrite: Annotated[bool, _output(help="Replace the output directory after success.")] = False
    push_to_hub: Annotated[
        str | None,
        _output(metavar="NAME", help="Upload the result to this repository of the Hub."),
    ] = None
    private: Annotated[bool, _output(help="Create that repository as a private one.")] = False
    restart: Annotated[bool, _output(help="Throw away what an interrupted run has done.")] = False


@dataclass(frozen=True, kw_only=True)
class EvaluationFlags:
    """Evaluation."""

    skip_evaluation: Annotated[bool, _evaluation(help="Skip the evaluation.")] = False
    eval_data: Annotated[
        str | None,
        _evaluation(
            metavar="FILE|NAME",
            help="Text for the perplexity, like --dataset. Default: "
            f"{EVALUATION}. Aliases: --evaluation_dataset, --eval_data_dir.",
        ),
    ] = None
    num_eval_data: Annotated[
        int | None,
        _evaluation(
            metavar="N",
            min=-1,
            help=f"Maximum number of windows (default {EVAL_WINDOWS}) and of questions per task "
            "(default all); 0 = all.",
        ),
    ] = None
    eval_seq_len: Annotated[
        int | None,
        _evaluation(metavar="N", min=2, help="Tokens per evaluation window (default: --seq_len)."),
    ] = None
    tasks: Tasks = None
    include_path: IncludePath = None
    num_fewshot: NumFewshot = None
    apply_chat_template: ChatTemplate = False
    eval_batch_size: Annotated[
        str,
        _evaluation(
            metavar="N|auto[:N]",
            help="Windows per batch, and questions per batch of a task (auto searches the "
            "largest).",
        ),
    ] = "8"
    max_eval_batch_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Upper bound of the search of auto.")
    ] = 64
    use_ppl_eval_for_kv_cache: Annotated[
        bool,
        _evaluation(help="Measure perplexity after a long context that the cache holds."),
    ] = False
    ppl_eval_for_kv_cache_context_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Tokens of the context.")
    ] = 1024
    ppl_eval_for_kv_cache_sample_size: Annotated[
        int, _evaluation(metavar="N", min=1, help="Tokens to measure after the context.")
    ] = 512
    ppl_eval_for_kv_cache_patch_size: Annotated[
        int | None,
        _evaluation(metavar="N", min=1, help="Maximum number of contexts (default: all)."),
    ] = None
    save_metrics_to_csv: Annotated[
        bool, _evaluation(help="Write the metrics to evaluation_metrics.csv.")
    ] = False
    metrics_output_dir: Annotated[
        Path, _evaluation(metavar="DIR", help="Directory of evaluation_metrics.csv.")
    ] = Path("metrics_output_dir")
