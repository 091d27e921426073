"""Flags and verbs of other tools, and what to type here instead."""

from __future__ import annotations

from collections.abc import Iterable

_SCHEME = (
    "A scheme names the bits. Give one, such as --quant_scheme {}; 'quark schemes' lists them."
)
_OPTION = (
    "Options of algorithms are keys of a JSON file. Give --quant_algo_config_file FILE "
    "(docs/algorithms.md)."
)

# Flag of other tools -> flag here with the same meaning.
_FLAGS = {
    **dict.fromkeys(
        ("checkpoint", "model", "model_args", "model_id", "model_name", "model_name_or_path"),
        "model_dir",
    ),
    **dict.fromkeys(("model_path", "pretrained", "pretrained_model_dir"), "model_dir"),
    **dict.fromkeys(("out", "out_dir", "output", "output_path"), "output_dir"),
    **dict.fromkeys(("quant_path", "save_directory", "save_path"), "output_dir"),
    **dict.fromkeys(("scheme", "qformat", "quant_type", "quantization"), "quant_scheme"),
    **dict.fromkeys(("dtype", "torch_dtype"), "data_type"),
    **dict.fromkeys(("ignore", "ignored_layers", "modules_to_not_convert"), "exclude_layers"),
    **dict.fromkeys(("algorithm", "modifier", "quant_method"), "quant_algo"),
    **dict.fromkeys(("calib_data", "calib_dataset", "calibration_dataset"), "dataset"),
    **dict.fromkeys(("calib_size", "n_samples", "nsamples"), "num_calib_data"),
    **dict.fromkeys(("max_calib_samples", "num_calibration_samples"), "num_calib_data"),
    **dict.fromkeys(("max_length", "max_seq_len", "max_seq_length", "seqlen"), "seq_len"),
    **dict.fromkeys(("kv_cache_scheme", "kv_dtype"), "kv_cache_dtype"),
    **dict.fromkeys(("export", "export_fmt", "export_format"), "model_export"),
    **dict.fromkeys(("custom_mode", "format", "model_export", "output_format"), "to"),
    "limit": "num_eval_data",
    **dict.fromkeys(("max_windows", "num_eval_data", "num_windows"), "limit"),
    **dict.fromkeys(("eval_data", "eval_data_dir", "evaluation_dataset"), "dataset"),
    "eval_batch_size": "batch_size",
    "eval_seq_len": "seq_len",
    "imatrix": "statistics",
    "q_group_size": "group_size",
    "skip_eval": "skip_evaluation",
}
# Flag of other tools -> what to type, for verbs with --quant_scheme.
_ADVICE = {
    **dict.fromkeys(("bits", "quantization_bit"), _SCHEME.format("int4_wo_128")),
    **dict.fromkeys(("q_bits", "w_bit", "wbits"), _SCHEME.format("int4_wo_128")),
    **dict.fromkeys(("bnb_4bit_quant_type", "load_in_4bit"), _SCHEME.format("uint4_wo_64")),
    "load_in_8bit": _SCHEME.format("ptpc_int8"),
    **dict.fromkeys(
        ("sym", "zero_point"),
        "The scheme has zero points or not: give --quant_scheme uint4_wo_128 or int4_wo_128.",
    ),
    **dict.fromkeys(
        ("act_order", "damp_percent", "dampening_frac", "desc_act", "smoothing_strength"), _OPTION
    ),
    "no_weight_matrix_merge": "Scales are merged with --weight_matrix_merge alone. Leave it out.",
    "quant_algo_config": _OPTION,
    "targets": "All linear layers are quantized. Give --exclude_layers, or --layer_quant_scheme.",
}
# Verb of other tools -> verb here.
VERBS = {
    "benchmark": "compare",
    "export": "convert",
    "help": "--help",
    "info": "inspect",
    "oneshot": "quantize",
    "perplexity": "evaluate",
    "ppl": "evaluate",
    "version": "--version",
}
# Value of --model_export of other tools -> what to type.
FILES = {
    **dict.fromkeys(("hf", "huggingface", "safetensors"), "--model_export hf_format"),
    "quark_safetensors": "--model_export hf_format",  # of earlier AMD Quark
    **dict.fromkeys(("llama.cpp", "llamacpp"), "--model_export gguf"),
    **dict.fromkeys(("pt", "pth", "torch"), "--model_export quark_format"),
    "vllm": "--model_export hf_format",
}
# Value of --custom_mode of other tools -> what to type.
LAYOUTS = {
    **dict.fromkeys(("hf", "huggingface", "safetensors", "vllm"), "--custom_mode quark"),
    **dict.fromkeys(("float_quantized", "llmcompressor"), "--custom_mode compressed-tensors"),
    **dict.fromkeys(("pack_quantized", "sglang"), "--custom_mode compressed-tensors"),
    **dict.fromkeys(("llama.cpp", "llamacpp"), "--model_export gguf"),
}
# Value of --to of other tools -> what to type.
TARGETS = {
    **dict.fromkeys(("hf", "hf_format", "huggingface", "safetensors", "vllm"), "--to quark"),
    **dict.fromkeys(("llama.cpp", "llamacpp"), "--to gguf"),
}
# Algorithm of other tools -> what to type. The modifiers are those of llm-compressor.
_ROTATION = "--pre_quantization_optimization rotation"
_MODIFIERS = ("autoround", "awq", "gptq", "smoothquant", "sparsegpt")
ALGORITHMS = {
    **{f"{name}modifier": f"--quant_algo {name}" for name in _MODIFIERS},
    **dict.fromkeys(("quip", "quipmodifier", "spinquant", "spinquantmodifier"), _ROTATION),
    **dict.fromkeys(("none", "rtn"), "no --quant_algo: it is rounding to the nearest code"),
    **dict.fromkeys(("hqq", "omniquant"), "--quant_algo gptq or awq"),
    "imatrix": "--quant_algo gptq",
}
# Value of --data_type that is no type of a float model here -> what to type.
_BITS = "--data_type auto: it is the type of the float model, and the scheme names the bits"
MEANT_TYPES = {
    **dict.fromkeys(("fp16", "half"), "--data_type float16"),
    **dict.fromkeys(("float", "fp32"), "--data_type float32"),
    **dict.fromkeys(("float8", "fp4", "fp8", "int4", "int8", "uint4"), _BITS),
}
FLOATS = ("bf16", "bfloat16", "float16", "float32", "fp16", "fp32")
FLOAT_CACHES = ("auto", *FLOATS, "none")  # data types of a cache in float
_PLACES = ("model_dir", "output_dir")
_PLAIN = "Give directories without a flag."


def advice(flag: str, options: Iterable[str], arguments: Iterable[str]) -> str | None:
    """Return a sentence that says what to type for a flag of another tool, or None.

    Args:
        flag: The unknown flag, such as ``--w_bit``.
        options: Names of the flags of the verb.
        arguments: Names of what it takes without a flag.
    """
    name, known = flag.lstrip("-").replace("-", "_"), set(options)
    if name in _ADVICE and "quant_scheme" in known:
        return _ADVICE[name]
    here = _FLAGS.get(name, name)
    if here in known:
        return f"Give --{here}."
    return _PLAIN if here in _PLACES and arguments else None
