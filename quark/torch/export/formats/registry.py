"""The table of checkpoint formats. It imports nothing, so that listing the names costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Value of ``quant_method``, also given as ``custom_mode`` -> "module:class", imported on use.
FORMATS: dict[str, str] = {
    "quark": "quark.torch.export.formats.quark:QuarkFormat",
    "awq": "quark.torch.export.formats.awq:AwqFormat",
    "gptq": "quark.torch.export.formats.gptq:GptqFormat",
    "compressed-tensors": "quark.torch.export.formats.compressed_tensors:CompressedTensorsFormat",
    "fp8": "quark.torch.export.formats.fp8:Fp8Format",
    "modelopt": "quark.torch.export.formats.modelopt:ModelOptFormat",
    "mxfp8": "quark.torch.export.formats.mxfp8:Mxfp8Format",
    "mlx": "quark.torch.export.formats.mlx:MlxFormat",
    "mxfp4": "quark.torch.export.formats.mxfp4:Mxfp4Format",
    "torchao": "quark.torch.export.formats.torchao:TorchaoFormat",
}


def load_format(name: str) -> Any:
    """Return the class of a format of ``FORMATS``."""
    module, _, attribute = FORMATS[name].partition(":")
    return getattr(import_module(module), attribute)
