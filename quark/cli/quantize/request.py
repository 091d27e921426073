"""What ``quark quantize`` was asked for, checked before any work."""

from __future__ import annotations

import logging
import re
import tempfile
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from quark.cli.console import wrong
from quark.cli.models import read_config
from quark.cli.quantize.compatibility import CompatibilityFlags, check_compatibility
from quark.cli.quantize.flags import (
    AlgorithmFlags,
    CalibrationFlags,
    EvaluationFlags,
    ModelFlags,
    OutputFlags,
    ReloadFlags,
    SchemeFlags,
)

logger = logging.getLogger(__name__)

WAYS = ("quant_scheme", "recipe", "config")  # to say how a model is quantized
EVALUATION_BATCH = 8  # windows, where the size of a batch is to be found by trying


@dataclass(frozen=True, kw_only=True)
class Request(
    CompatibilityFlags,
    ReloadFlags,
    EvaluationFlags,
    OutputFlags,
    CalibrationFlags,
    AlgorithmFlags,
    SchemeFlags,
    ModelFlags,
):
    """The flags of ``quark quantize``; see its help. None is what was not given."""

    @property
    def layer_schemes(self) -> list[tuple[str, str]]:
        """Pairs of a pattern of layer names and a scheme."""
        values = self.layer_quant_scheme or []
        return list(zip(values[::2], values[1::2], strict=True))

    @property
    def layer_group_sizes(self) -> list[tuple[str, int]]:
        """Pairs of a pattern of layer names and a group size."""
        values = self.group_size_per_layer or []
        return [(p, int(size)) for p, size in zip(values[::2], values[1::2], strict=True)]

    @property
    def algorithms(self) -> list[str]:
        """Names of algorithms in the order in which they are applied."""
        return names_in([*(self.pre_quantization_optimization or []), *(self.quant_algo or [])])

    @property
    def excluded(self) -> list[str] | None:
        """Patterns of layers to leave alone, None for the output head."""
        if self.exclude_layers is None:
            return None
        return [pattern for pattern in self.exclude_layers if pattern]

    @property
    def is_reload(self) -> bool:
        """Whether a quantized model is loaded."""
        return self.model_reload or self.params_load

    @property
    def quantizes(self) -> bool:
        """Whether a model is quantized here."""
        return not (self.is_reload or self.skip_quantization)

    @property
    def exports(self) -> list[str]:
        """Formats to write, without repetition."""
        if self.quantizes or "model_export" in self.given:
            return list(dict.fromkeys(name.value for name in self.model_export))
        return []

    @property
    def reload_dir(self) -> Path:
        """Directory of the quantized model to reload."""
        return self.import_model_dir or self.output_dir

    @property
    def evaluation_batch(self) -> int:
        """Windows that are evaluated together."""
        size = self.eval_batch_size.rpartition(":")[2]
        return int(size) if size.isdecimal() else EVALUATION_BATCH


def names_in(lists: list[str]) -> list[str]:
    """Return the names in lists separated by commas."""
    return [name.strip() for names in lists for name in names.split(",") if name.strip()]


def check_places(request: Request) -> None:
    """Check that the model is there and that the output can be.

    Raises:
        typer.BadParameter: It is not, or cannot.
    """
    sources = [request.model_dir.resolve()]
    if request.model_reload:
        sources.append(request.reload_dir.resolve())
    if request.exports:
        _check_target("--output_dir", request.output_dir, sources, request.overwrite)
    if request.params_save:
        _check_target("--save_dir", request.save_dir, sources, request.overwrite)
    if "onnx" in request.exports and request.verify and _data_type(request) == "bfloat16":
        raise wrong(
            "--verify",
            "the model is in bfloat16, in which ONNX Runtime computes nothing on a CPU. Give "
            "--data_type float32 or float16, or leave this out.",
        )


def _data_type(request: Request) -> str | None:
    """Return the type that the model is loaded in, None where only its parameters say it."""
    if request.params_load:
        return None
    if request.data_type != "auto":
        return request.data_type
    if request.model_reload:
        described = read_config(request.reload_dir, "--import_model_dir")
    else:
        described = read_config(request.model_dir, "--model_dir")
    return described.get("dtype") or described.get("torch_dtype")


def _check_target(flag: str, given: Path, sources: list[Path], overwrite: bool) -> None:
    target = given.resolve()
    if any(target == source or target in source.parents for source in sources):
        raise wrong(flag, f"{target} holds the model itself. Choose another directory.")
    if target.exists() and not target.is_dir():
        raise wrong(flag, f"{target} is a file. Choose a directory.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise wrong(
            flag,
            f"{given} exists and is not empty. Choose another directory, or replace it with "
            "--overwrite.",
        )
    parent = next(p for p in target.parents if p.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise wrong(flag, f"nothing can be written to {parent} ({error}).") from None


def check_flags(request: Request) -> None:
    """Check that flags do not contradict each other.

    Raises:
        typer.BadParameter: Some do.
    """
    check_compatibility(request)
    if request.quantizes:
        _check_scheme(request)
    else:
        _check_reload(request)
    formats = request.exports
    for name, file in {"gguf": "a GGUF file", "onnx": "an ONNX file"}.items():
        if name in formats and request.custom_mode != "quark":
            raise wrong("--custom_mode", f"{file} has one layout. Leave it out.")
    if "onnx" in formats and request.verify and find_spec("onnxruntime") is None:
        raise wrong("--verify", "an ONNX file is run by ONNX Runtime: pip install onnxruntime.")
    if {"hf_format", "quark_format"} <= set(formats):
        raise wrong("--model_export", "hf_format and quark_format take two directories: run twice.")
    _check_evaluation(request)


def _check_scheme(request: Request) -> None:
    if sum(getattr(request, way) is not None for way in WAYS) != 1:
        raise wrong(
            "--quant_scheme",
            "give the name of a scheme ('quark schemes' lists them), or else --recipe NAME or "
            "--config FILE.",
        )
    described = {field.name for flags in (SchemeFlags, AlgorithmFlags) for field in fields(flags)}
    for name in sorted(described - {*WAYS, "statistics", "weight_matrix_merge"}):
        if request.config is not None and name in request.given:
            raise wrong(f"--{name}", "the file of --config says this. Leave one of them out.")
    for name in ("pre_quantization_optimization", "quant_algo", "quant_algo_config_file"):
        if request.recipe is not None and name in request.given:
            raise wrong(f"--{name}", "the recipe names its algorithms. Leave one of them out.")
    for name in ("min_kv_scale", "kv_cache_post_rope"):
        if request.kv_cache_dtype is None and name in request.given:
            raise wrong(f"--{name}", "no cache is quantized without --kv_cache_dtype.")
    if request.group_size == 0:
        raise wrong("--group_size", "a group of 0 weights has no scale. Give -1 for whole rows.")
    if len(request.layer_quant_scheme or []) % 2:
        raise wrong("--layer_quant_scheme", "expected a pattern and a scheme, as in '*.0.*' fp8.")
    sizes = request.group_size_per_layer or []
    if len(sizes) % 2 or not all(size.isdecimal() and int(size) for size in sizes[1::2]):
        raise wrong("--group_size_per_layer", "expected a pattern and a number: lm_head 32.")
    for name in ("import_model_dir", "json_path", "safetensors_path"):
        if getattr(request, name) is not None:
            raise wrong(f"--{name}", "nothing is loaded without --model_reload or --params_load.")


def _check_reload(request: Request) -> None:
    if request.model_reload and request.params_load:
        raise wrong("--params_load", "the model comes from --model_reload. Leave one of them out.")
    if request.params_load:
        for name in ("json_path", "safetensors_path"):
            path: Path | None = getattr(request, name)
            if path is None or not path.is_file():
                raise wrong(f"--{name}", f"give the file that --params_save wrote, not {path}.")
    if not request.is_reload and (request.exports or request.params_save):
        raise wrong("--skip_quantization", "a float model is not exported. Leave one of them out.")
    if request.skip_evaluation and not (request.exports or request.params_save):
        raise wrong("--skip_evaluation", "nothing is left to be done. Leave it out.")
    unused = (SchemeFlags, AlgorithmFlags, CalibrationFlags)
    names = {field.name for flags in unused for field in fields(flags)} - {"seq_len"}
    for name in sorted(request.given & names):
        logger.warning("--%s: nothing is quantized, so it has no effect.", name)
    if request.params_load and "data_type" in request.given:
        logger.warning("--data_type: parameters have the types that they were saved in.")


def _check_evaluation(request: Request) -> None:
    measured = {field.name for field in fields(EvaluationFlags)} - {"skip_evaluation"}
    for name in sorted(request.given & measured):
        if request.skip_evaluation:
            raise wrong(
                f"--{name}", "nothing is evaluated with --skip_evaluation. Leave one of them out."
            )
    for name in ("include_path", "num_fewshot", "apply_chat_template"):
        if request.tasks is None and name in request.given:
            raise wrong(f"--{name}", "there are no tasks without --tasks.")
    if request.num_eval_data == 0:
        raise wrong("--num_eval_data", "nothing can be measured on 0. Give -1 for all.")
    if not re.fullmatch(r"auto(:[1-9]\d*)?|[1-9]\d*", request.eval_batch_size):
        raise wrong(
            "--eval_batch_size", f"expected N, auto or auto:N, not {request.eval_batch_size}."
        )
