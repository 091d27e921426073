"""What ``quark quantize`` was asked for: checked before any work, and made a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.console import wrong

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.config.config import Config, QuantizationConfig


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
    dataset: str | None
    num_calib_data: int
    seq_len: int | None
    batch_size: int
    data_type: str
    device: str
    trust_remote_code: bool
    model_export: str
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
    if not parent.is_dir() or not _is_writable(parent):
        raise wrong("--output_dir", f"{parent} is not a directory that can be written to.")


def _is_writable(directory: Path) -> bool:
    import os

    return os.access(directory, os.W_OK | os.X_OK)


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
    }
    for flag, value in scheme_flags.items():
        if request.config is not None and value is not None:
            raise wrong(flag, "the file of --config says this already. Leave one of them out.")
    if request.min_kv_scale is not None and request.kv_cache_dtype is None:
        raise wrong("--min_kv_scale", "there is no cache to scale without --kv_cache_dtype.")
    if len(request.layer_quant_scheme or []) % 2:
        raise wrong("--layer_quant_scheme", "expected a pattern and a scheme, as in '*.0.*' fp8.")
    for flag, value in {"--eval_data": request.eval_data, "--num_eval_data": request.num_eval_data}.items():
        if request.skip_evaluation and value is not None:
            raise wrong(flag, "nothing is evaluated with --skip_evaluation. Leave one of them out.")


def make_config(request: Request, model_type: str) -> Config:
    """Return the configuration that was asked for, still without the output head excluded.

    Raises:
        typer.BadParameter: A name is unknown, or flags do not fit the schemes.
    """
    config = _from_file(request.config) if request.config else _from_schemes(request, model_type)
    if request.weight_matrix_merge and not any(_shares(layer) for layer in layer_configs(config)):
        raise wrong(
            "--weight_matrix_merge",
            "only per-tensor scales of symmetric weights can be shared, and there are none here.",
        )
    return config


def layer_configs(config: Config) -> Iterator[QuantizationConfig]:
    """Iterate over all layer configurations of a configuration."""
    yield config.global_quant_config
    for by_name in (config.layer_quant_config, config.kv_cache_quant_config):
        yield from by_name.values()
    yield from config.layer_type_quant_config.values()


def _shares(layer: QuantizationConfig) -> bool:
    from quark.torch.quantization.config.type import QSchemeType

    spec = layer.weight
    return spec is not None and spec.qscheme is QSchemeType.per_tensor and spec.scheme.symmetric


def _from_file(path: Path) -> Config:
    from quark.torch.export.checkpoint import read_json
    from quark.torch.quantization.config.config import Config

    try:
        return Config.from_dict(read_json(path))
    except (OSError, TypeError, ValueError) as error:
        raise wrong("--config", f"{path}: {error}") from None


def _from_schemes(request: Request, model_type: str) -> Config:
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES
    from quark.torch.quantization.config.template import LLMTemplate, with_kv_cache

    if request.kv_cache_dtype is not None:
        _known("--kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_SCHEMES)
    assert request.quant_scheme is not None
    named = [("--quant_scheme", request.quant_scheme)]
    named += [("--layer_quant_scheme", name) for _, name in request.layer_schemes]
    layers = [_scheme(flag, name, request.group_size) for flag, name in named]
    if request.group_size is not None and not any(grouped for _, grouped in layers):
        raise wrong(
            "--group_size",
            f"{request.quant_scheme} has no groups, or names their size itself. Leave it out.",
        )
    by_name = {p: layer for (p, _), (layer, _) in zip(request.layer_schemes, layers[1:], strict=True)}
    config = Config(
        global_quant_config=layers[0][0],
        layer_quant_config=by_name,
        exclude=request.excluded or [],
    )
    if request.kv_cache_dtype is not None:
        patterns = LLMTemplate.get(model_type).kv_layers_name
        floor = request.min_kv_scale or 0.0
        config = with_kv_cache(config, patterns, request.kv_cache_dtype, floor)
    return config


def _scheme(flag: str, name: str, group_size: int | None) -> tuple[QuantizationConfig, bool]:
    """Return what a scheme stands for, and whether it takes its group size from the caller."""
    from quark.torch.quantization.config import presets

    try:
        layer = presets.scheme(name)
    except ValueError:
        _known(flag, name, presets.scheme_names())
        raise
    if group_size is None:
        return layer, False
    sized = presets.scheme(name, group_size)
    return sized, presets.scheme(name, group_size + 1) != sized


def _known(flag: str, name: str, names: Iterable[str]) -> None:
    from quark.torch.quantization.config.names import nearest

    names = list(names)
    if name.lower() in [known.lower() for known in names]:
        return
    near = nearest(name, names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise wrong(flag, f"{name!r} is unknown. {hint}'quark schemes' lists all names.")


def excluding_head(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the output head of the model excluded, whatever its name."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [name for name, module in model.named_modules() if head is not None and module is head]
    return replace(config, exclude=[*names, *config.exclude])
