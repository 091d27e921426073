"""What ``quark quantize`` was asked for, checked before any work."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from quark.cli.console import wrong


@dataclass(frozen=True)
class Request:
    """The flags of ``quark quantize``; see its help. None is what was not given."""

    model_dir: Path
    output_dir: Path
    quant_scheme: str | None
    config: Path | None
    group_size: int | None
    kv_cache_dtype: str | None
    min_kv_scale: float | None
    layer_quant_scheme: list[str] | None
    exclude_layers: list[str] | None
    weight_matrix_merge: bool
    pre_quantization_optimization: list[str] | None
    quant_algo: list[str] | None
    quant_algo_config_file: list[str] | None
    dataset: str | None
    num_calib_data: int
    seq_len: int | None
    batch_size: int
    data_type: str
    device: str
    trust_remote_code: bool
    model_export: str
    custom_mode: str
    export_weight_format: str
    pack_method: str
    overwrite: bool
    skip_evaluation: bool
    eval_data: str | None
    num_eval_data: int | None

    @property
    def layer_schemes(self) -> list[tuple[str, str]]:
        """Pairs of a pattern of layer names and a scheme."""
        values = self.layer_quant_scheme or []
        return list(zip(values[::2], values[1::2], strict=True))

    @property
    def algorithms(self) -> list[str]:
        """Names of algorithms in the order in which they are applied."""
        lists = [*(self.pre_quantization_optimization or []), *(self.quant_algo or [])]
        return [name.strip() for names in lists for name in names.split(",") if name.strip()]

    @property
    def excluded(self) -> list[str] | None:
        """Patterns of layers to leave alone, None for the output head."""
        if self.exclude_layers is None:
            return None
        return [pattern for pattern in self.exclude_layers if pattern]


def check_places(request: Request) -> None:
    """Check that the model is there and that the output can be.

    Raises:
        typer.BadParameter: It is not, or cannot.
    """
    source, target = request.model_dir.resolve(), request.output_dir.resolve()
    if not source.is_dir():
        raise wrong(
            "--model_dir",
            f"there is no directory {request.model_dir}. One of the Hub comes by 'hf download "
            "OWNER/NAME --local-dir DIRECTORY'.",
        )
    if target == source or target in source.parents:
        raise wrong("--output_dir", f"{target} holds the model itself. Choose another directory.")
    if target.exists() and not target.is_dir():
        raise wrong("--output_dir", f"{target} is a file. Choose a directory.")
    if target.is_dir() and any(target.iterdir()) and not request.overwrite:
        raise wrong(
            "--output_dir",
            f"{request.output_dir} exists and is not empty. Choose another directory, or replace "
            "it with --overwrite.",
        )
    parent = next(p for p in target.parents if p.exists())
    try:
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise wrong("--output_dir", f"nothing can be written to {parent} ({error}).") from None


def check_flags(request: Request) -> None:
    """Check that flags do not contradict each other.

    Raises:
        typer.BadParameter: Some do.
    """
    if (request.quant_scheme is None) == (request.config is None):
        raise wrong(
            "--quant_scheme",
            "give the name of a scheme ('quark schemes' lists them), or else --config FILE.",
        )
    scheme_flags = {
        "--group_size": request.group_size,
        "--kv_cache_dtype": request.kv_cache_dtype,
        "--layer_quant_scheme": request.layer_quant_scheme,
        "--exclude_layers": request.exclude_layers,
        "--quant_algo": request.quant_algo,
        "--pre_quantization_optimization": request.pre_quantization_optimization,
        "--quant_algo_config_file": request.quant_algo_config_file,
    }
    for flag, value in scheme_flags.items():
        if request.config is not None and value is not None:
            raise wrong(flag, "the file of --config says this already. Leave one of them out.")
    if request.min_kv_scale is not None and request.kv_cache_dtype is None:
        raise wrong("--min_kv_scale", "there is no cache to scale without --kv_cache_dtype.")
    if len(request.layer_quant_scheme or []) % 2:
        raise wrong("--layer_quant_scheme", "expected a pattern and a scheme, as in '*.0.*' fp8.")
    if request.model_export == "gguf" and request.custom_mode != "quark":
        raise wrong("--custom_mode", "a GGUF file has one layout. Leave it out.")
    given = {"--eval_data": request.eval_data, "--num_eval_data": request.num_eval_data}
    for flag, value in given.items():
        if request.skip_evaluation and value is not None:
            raise wrong(flag, "nothing is evaluated with --skip_evaluation. Leave one of them out.")
