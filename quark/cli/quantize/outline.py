"""The structure of the model before its weights are read: parts that stay in float."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.parts import Part

_PLURAL = 3  # names of parts of a kind to print


def why_not_kept(request: Request) -> str:
    """Return why layers in float cannot keep the codes of a quantized source, "" if they can."""
    from quark.torch.export.containers.base import get_container

    if request.no_keep_prequantized_layers:
        return "--no_keep_prequantized_layers"
    if request.model_dir.is_file():
        return "codes of GGUF files are not kept"
    if request.exports and request.custom_mode != "quark":
        return f"--custom_mode {request.custom_mode} does not hold them beside other schemes"
    for container in map(get_container, request.exports):
        if not container.has_formats:
            return f"{container.title} does not hold them beside other schemes"
    return ""


def describe_float_layers(request: Request, config: Config, outline: nn.Module | None) -> str:
    """Return which layers stay in float, in words for the plan.

    Args:
        request: The flags.
        config: The configuration, before it is resolved against the model.
        outline: The model on the meta device, or None.
    """
    from quark.torch.quantization.config.parts import find_parts

    is_default = request.config is None and request.exclude_layers is None
    words = ["the output head" if is_default else ", ".join(config.exclude)]
    if outline is not None and config.float_parts:
        parts = [part for part in find_parts(outline) if part.kind in config.float_parts]
        words += _describe_by_title(parts)
    return "; ".join(filter(None, words)) or "nothing"


def describe_quantized_parts(config: Config, outline: nn.Module | None) -> str:
    """Return which parts beside the language model have layers that are quantized, in words."""
    from quark.torch.quantization.config.match import assign
    from quark.torch.quantization.config.parts import find_parts
    from quark.torch.quantization.config.resolution import resolve_names
    from quark.torch.quantization.nn.operators import is_operator_module

    if outline is None:
        return ""
    operators = {n: type(m) for n, m in outline.named_modules() if is_operator_module(m)}
    names = assign(operators, resolve_names(config, outline))
    parts = [part for part in find_parts(outline) if any(map(part.holds, names))]
    return "; ".join(_describe_by_title(parts))


def _describe_by_title(parts: list[Part]) -> list[str]:
    titles = dict.fromkeys(part.title for part in parts)
    return [_describe([part for part in parts if part.title == title]) for title in titles]


def _describe(parts: list[Part]) -> str:
    """Return the title and names of equal parts: ``vision tower (model.visual)``."""
    names = [part.name for part in parts[:_PLURAL]] + ["…"] * (len(parts) > _PLURAL)
    count = f"{len(parts)} × " if len(parts) > 1 else ""
    return f"{count}{parts[0].title} ({', '.join(names)})"
