"""The request of ``quark quantize``: its flags, checked before any work."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, fields
from pathlib import Path

from quark.cli.console import wrong
from quark.cli.hub import check_repository_name, check_upload
from quark.cli.model_files import GRAPH_SUFFIX, PYTHON_ENTRY
from quark.cli.models import read_config
from quark.cli.options import check_task_flags
from quark.cli.outputs import check_directory, check_offload_directory
from quark.cli.quantize.compatibility import CompatibilityFlags, check_compatibility
from quark.cli.quantize.flags import (
    AlgorithmFlags,
    CalibrationFlags,
    EvaluationFlags,
    ModelFlags,
    OutputFlags,
    RunFlags,
)
from quark.cli.quantize.graph_flags import GraphFlags
from quark.cli.quantize.reload_flags import ReloadFlags
from quark.cli.quantize.scheme_flags import SchemeFlags
from quark.torch.export.containers.registry import SAFETENSORS
from quark.torch.quantization.config.export import PACK_METHODS, WEIGHT_FORMATS

logger = logging.getLogger(__name__)

# Flag -> the flag without which it has no effect.
_NEEDED = {
    "save_dir": "params_save",
    "metrics_output_dir": "save_metrics_to_csv",
    "ppl_eval_for_kv_cache_context_size": "use_ppl_eval_for_kv_cache",
    "ppl_eval_for_kv_cache_sample_size": "use_ppl_eval_for_kv_cache",
    "ppl_eval_for_kv_cache_patch_size": "use_ppl_eval_for_kv_cache",
}
# Flag of a layout -> its default.
_LAYOUT_FLAGS = {
    "custom_mode": "quark",
    "export_weight_format": WEIGHT_FORMATS[0],
    "pack_method": PACK_METHODS[0],
}
SOURCES = ("quant_scheme", "recipe", "config")  # flags that give a configuration; one of them
EVALUATION_BATCH = 8  # windows per batch where --eval_batch_size is auto


@dataclass(frozen=True, kw_only=True)
class Request(
    CompatibilityFlags,
    GraphFlags,
    ReloadFlags,
    EvaluationFlags,
    OutputFlags,
    CalibrationFlags,
    AlgorithmFlags,
    SchemeFlags,
    RunFlags,
    ModelFlags,
):
    """The flags of ``quark quantize``; see its help. None stands for a flag that is not given."""

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
        return split_names([*(self.pre_quantization_optimization or []), *(self.quant_algo or [])])

    @property
    def attention(self) -> str | None:
        """Name of the scheme of attention; None for float."""
        return "fp8" if self.fp8_attention_quant else self.attention_scheme

    @property
    def excluded(self) -> list[str] | None:
        """Name patterns of layers to leave in float; None for the default."""
        if self.exclude_layers is None:
            return None
        return [pattern for pattern in self.exclude_layers if pattern]

    @property
    def entry(self) -> str | None:
        """The ``module:function`` that builds the model, or None."""
        given = str(self.model_dir)
        is_entry = PYTHON_ENTRY.fullmatch(given) is not None and not self.model_dir.exists()
        return given if is_entry else None

    @property
    def is_graph(self) -> bool:
        """Whether the model is quantized as a graph: a file of ``torch.export``, or an entry."""
        return self.model_dir.suffix == GRAPH_SUFFIX or self.entry is not None

    @property
    def is_reload(self) -> bool:
        """Whether an already quantized model is loaded."""
        return self.model_reload or self.params_load

    @property
    def quantizes(self) -> bool:
        """Whether the model is to be quantized."""
        return not (self.is_reload or self.skip_quantization)

    @property
    def flow(self) -> str | None:
        """A name of ``QUANT_FLOWS``; None where the flow is chosen by the scheme and the flags."""
        return "file2file" if self.file2file_quantization else self.quant_flow

    @property
    def exports(self) -> list[str]:
        """Containers to write, without repetition; files become safetensors without a flag."""
        if "model_export" not in self.given:
            if not self.quantizes:
                return []
            if self.flow == "file2file":
                return [SAFETENSORS]
        return list(dict.fromkeys(self.model_export))

    @property
    def reload_dir(self) -> Path:
        """Directory of the quantized model to reload."""
        return self.import_model_dir or self.output_dir

    @property
    def evaluation_batch(self) -> int:
        """Windows per evaluation batch."""
        size = self.eval_batch_size.rpartition(":")[2]
        return int(size) if size.isdecimal() else EVALUATION_BATCH


def split_names(lists: list[str]) -> list[str]:
    """Return the names of lists that are separated by commas or spaces."""
    return [name for names in lists for name in names.replace(",", " ").split()]


def check_places(request: Request) -> None:
    """Check that the model exists and that the output directories can be written.

    Raises:
        typer.BadParameter: The model does not exist, or a directory cannot be written.
    """
    sources = [request.model_dir.resolve()]
    if request.model_reload:
        sources.append(request.reload_dir.resolve())
    if request.exports and not request.plan:
        _check_target("--output_dir", request.output_dir, sources, request.overwrite)
    if request.params_save and not request.plan:
        _check_target("--save_dir", request.save_dir, sources, request.overwrite)
    if request.offload_dir is not None:
        check_offload_directory(request.offload_dir)
    if request.exports and request.verify:
        _check_verification(request)


def _check_verification(request: Request) -> None:
    """Check that the software that opens what is written is there, and computes in the type."""
    from quark.torch.export.containers.base import get_container

    dtype = _data_type(request)
    try:
        for name in request.exports:
            get_container(name).check_verifiable([] if dtype is None else [dtype])
    except (ImportError, ValueError) as error:
        raise wrong("--verify", str(error)) from None


def _data_type(request: Request) -> str | None:
    """Return the type in which the model is loaded; None with --params_load."""
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
        raise wrong(flag, f"{target} contains the model. Choose another directory.")
    if target.exists() and not target.is_dir():
        raise wrong(flag, f"{target} is a file. Choose a directory.")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise wrong(
            flag,
            f"{given} exists and is not empty. Choose another directory, or replace it with "
            "--overwrite.",
        )
    check_directory(flag, given, overwrite)


def check_flags(request: Request) -> None:
    """Check that flags do not contradict each other, and that the result can be uploaded.

    Raises:
        typer.BadParameter: Two flags contradict each other, or a value is wrong.
    """
    check_compatibility(request)
    _check_flow(request)
    for field in fields(GraphFlags):
        if field.name in request.given and not request.is_graph:
            raise wrong(f"--{field.name}", "is for graphs (.pt2). Leave it out.")
    if request.plan and not request.quantizes:
        raise wrong("--plan", "only a run that quantizes has a plan. Leave it out.")
    if request.quantizes:
        _check_scheme(request)
    else:
        _check_reload(request)
    _check_containers(request)
    _check_evaluation(request)
    if request.push_to_hub is not None and not request.exports:
        raise wrong("--push_to_hub", "this run writes no checkpoint. Leave it out.")
    if request.private and request.push_to_hub is None:
        raise wrong("--private", "needs --push_to_hub.")
    if request.push_to_hub is not None:
        check = check_repository_name if request.plan else check_upload
        check(request.push_to_hub)


def _check_flow(request: Request) -> None:
    if request.file2file_quantization and request.quant_flow not in (None, "file2file"):
        raise wrong("--quant_flow", "conflicts with --file2file_quantization. Leave one out.")
    if request.flow == "per_block":
        logger.warning(
            "--quant_flow per_block: the whole model is held in memory; the checkpoint is the same."
        )


def _check_pattern(flag: str, pattern: str) -> None:
    """Refuse regular expressions and lists with commas, as other tools have them."""
    if "," in pattern:
        names = " ".join(f'"{name.strip()}"' for name in pattern.split(","))
        raise wrong(flag, f"{pattern!r} has commas. Write spaces between patterns: {names}.")
    if pattern.startswith("re:"):
        similar = pattern.removeprefix("re:").replace(".*", "*").replace("\\", "").strip("^$")
        raise wrong(
            flag,
            f"{pattern!r} is a regular expression. Patterns are names, with * for any characters: "
            f"write {similar!r}.",
        )


def _check_containers(request: Request) -> None:
    """Check that containers can be written, together and with the flags that are given."""
    from quark.torch.export.containers.base import get_container

    containers = [get_container(name) for name in request.exports]
    for container in containers:
        for name, default in _LAYOUT_FLAGS.items():
            if not container.has_formats and getattr(request, name) != default:
                raise wrong(f"--{name}", f"{container.title} has one layout. Leave it out.")
        try:
            container.check_installed()
        except ImportError as error:
            raise wrong("--model_export", str(error)) from None
    if request.use_cache and "onnx" not in request.exports:
        raise wrong("--use_cache", "is for ONNX files: give --model_export onnx, or leave it out.")
    sharing = [container.name for container in containers if container.has_config_json]
    if len(sharing) > 1:
        names = " and ".join(sharing)
        raise wrong("--model_export", f"{names} take two directories: run twice.")


def _check_scheme(request: Request) -> None:
    given = [f"--{name}" for name in SOURCES if getattr(request, name) is not None]
    if len(given) > 1:
        raise wrong(given[0], f"conflicts with {given[1]}: give one of them.")
    if not given:
        raise wrong(
            "--quant_scheme",
            "give a scheme ('quark schemes' lists them), or --recipe NAME, or --config FILE: "
            "one of them.",
        )
    described = {field.name for flags in (SchemeFlags, AlgorithmFlags) for field in fields(flags)}
    finish = ("finish", "finish_config_file")
    for name in sorted(described - {*SOURCES, *finish, "statistics", "weight_matrix_merge"}):
        if request.config is not None and name in request.given:
            raise wrong(f"--{name}", "the file of --config sets this. Leave one of them out.")
    for name in ("pre_quantization_optimization", "quant_algo", "quant_algo_config_file"):
        if request.recipe is not None and name in request.given:
            raise wrong(f"--{name}", "the recipe sets the algorithms. Leave one of them out.")
    if request.fp8_attention_quant and request.attention_scheme not in (None, "fp8"):
        raise wrong("--attention_scheme", "conflicts with --fp8_attention_quant. Leave one out.")
    for name in ("min_kv_scale", "kv_cache_post_rope"):
        if request.kv_cache_dtype is None and name in request.given:
            raise wrong(f"--{name}", "the cache is quantized only with --kv_cache_dtype.")
    if request.finish is not None:
        _check_finish(request)
    elif request.finish_config_file is not None:
        raise wrong("--finish_config_file", "there is no finish. Add --finish distill.")
    named = (request.layer_quant_scheme or [])[::2]
    for flag, patterns in (("exclude_layers", request.excluded), ("layer_quant_scheme", named)):
        for pattern in patterns or []:
            _check_pattern(f"--{flag}", pattern)
    if request.group_size == 0:
        raise wrong(
            "--group_size", "a group size of 0 has no meaning. Give -1 for one group per row."
        )
    if len(request.layer_quant_scheme or []) % 2:
        raise wrong("--layer_quant_scheme", "expected a pattern and a scheme, such as '*.0.*' fp8.")
    for pattern, scheme in zip(named, (request.layer_quant_scheme or [])[1::2], strict=True):
        if "*" in scheme:
            raise wrong(
                "--layer_quant_scheme",
                f"the pattern comes first: --layer_quant_scheme '{scheme}' {pattern}",
            )
    sizes = request.group_size_per_layer or []
    if len(sizes) % 2 or not all(size.isdecimal() and int(size) for size in sizes[1::2]):
        raise wrong(
            "--group_size_per_layer", "expected a pattern and a number, such as lm_head 32."
        )
    for name in ("import_model_dir", "json_path", "safetensors_path"):
        if getattr(request, name) is not None:
            raise wrong(f"--{name}", "needs --model_reload or --params_load.")


def _check_finish(request: Request) -> None:
    """Check that there is data to train with and to judge by."""
    if request.statistics is not None:
        raise wrong("--finish", "statistics have no text to train on. Leave --statistics out.")
    if request.num_calib_data < 2:
        why = "one sequence trains and another one judges. Give --num_calib_data 2 or more."
        raise wrong("--finish", why)


def _check_reload(request: Request) -> None:
    if request.model_reload and request.params_load:
        raise wrong("--params_load", "conflicts with --model_reload. Leave one of them out.")
    if request.params_load:
        for name in ("json_path", "safetensors_path"):
            path: Path | None = getattr(request, name)
            if path is None or not path.is_file():
                raise wrong(f"--{name}", f"expected a file of --params_save, got {path}.")
    if not request.is_reload and (request.exports or request.params_save):
        raise wrong(
            "--skip_quantization", "a float model cannot be exported. Leave one of them out."
        )
    if request.skip_evaluation and not (request.exports or request.params_save):
        raise wrong("--skip_evaluation", "nothing is left to do. Leave it out.")
    unused = (SchemeFlags, AlgorithmFlags, CalibrationFlags)
    names = {field.name for flags in unused for field in fields(flags)} - {"seq_len"}
    for name in sorted(request.given & names):
        logger.warning("--%s has no effect: nothing is quantized.", name)
    if request.params_load and request.max_memory is not None:
        raise wrong("--max_memory", "parameters of --params_load are read at once. Leave it out.")
    if request.params_load and "data_type" in request.given:
        logger.warning("--data_type has no effect: parameters keep their saved types.")


def _check_evaluation(request: Request) -> None:
    measured = {field.name for field in fields(EvaluationFlags)} - {"skip_evaluation"}
    for name in sorted(request.given & measured):
        if request.skip_evaluation:
            raise wrong(f"--{name}", "conflicts with --skip_evaluation. Leave one of them out.")
    check_task_flags(request.tasks, request.given)
    for name, needed in _NEEDED.items():
        if name in request.given and not getattr(request, needed):
            raise wrong(f"--{name}", f"needs --{needed}.")
    if not re.fullmatch(r"auto(:[1-9]\d*)?|[1-9]\d*", request.eval_batch_size):
        raise wrong(
            "--eval_batch_size", f"expected N, auto or auto:N, not {request.eval_batch_size}."
        )
    if "max_eval_batch_size" in request.given and not request.eval_batch_size.startswith("auto"):
        raise wrong("--max_eval_batch_size", "needs --eval_batch_size auto.")
