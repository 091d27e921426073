"""The flags of ``quark quantize`` for models that are quantized already."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quark.cli.options import panel

_reload = panel("Quantized models")


@dataclass(frozen=True, kw_only=True)
class ReloadFlags:
    """Evaluation or export of a model that is already quantized."""

    skip_quantization: Annotated[bool, _reload(help="Evaluate the float model only.")] = False
    model_reload: Annotated[
        bool, _reload(help="Load a quantized checkpoint from --import_model_dir, or --output_dir.")
    ] = False
    import_model_dir: Annotated[
        Path | None, _reload(metavar="DIR", help="Directory of the quantized checkpoint.")
    ] = None
    params_load: Annotated[
        bool, _reload(help="Load a quantized model from the files of --params_save.")
    ] = False
    json_path: Annotated[
        Path | None, _reload(metavar="FILE", help="JSON file of --params_save.")
    ] = None
    safetensors_path: Annotated[
        Path | None, _reload(metavar="FILE", help="Safetensors file of --params_save.")
    ] = None
