"""Write the table of ``quark schemes``, so that the command starts without torch.

After a scheme was added or changed, run

    python scripts/scheme_table.py
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from quark.cli.schemes import TABLE
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import summarize
from quark.torch.export.containers.base import get_container
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.gguf.block_types import BLOCK_TYPES
from quark.torch.export.gguf.blocks import block_type
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.calibration import needs_data
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.description import describe, describe_layer
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import (
    KV_CACHE_SCHEMES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)

SIZE = 1024  # inputs and outputs of the layer whose bits are counted


def table() -> str:
    """Return the text of the table."""
    rows = {
        "quant_scheme": [layer_row(name) for name in sorted(scheme_names(), key=sort_key)],
        "kv_cache_dtype": [
            {"name": name, "kv_cache": describe(kv_cache_scheme(name))} for name in KV_CACHE_SCHEMES
        ],
    }
    return json.dumps(rows, indent=2) + "\n"


def layer_row(name: str) -> dict[str, Any]:
    """Return the row of a scheme of layers."""
    layer = scheme(name)
    words = describe_layer(layer)
    model = quantized_model(layer)
    tensors = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
    summary = summarize(tensors, model.quant_config, "float32")
    return {
        "name": name,
        "weight": words.weight,
        "input": words.input,
        "output": words.output,
        "needs_data": needs_data([layer]),
        "bits": summary.bits_per_weight,
        "layouts": [*layouts(model)],
        "gguf": gguf_type(layer),
        "onnx": fits_onnx(layer),
    }


class Net(nn.Module):
    """A model with one block of one layer: some layouts hold blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(OrderedDict(proj=nn.Linear(SIZE, SIZE)))
        self.layers = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        result: torch.Tensor = self.layers[0](x)
        return result


def quantized_model(layer: QuantizationConfig) -> nn.Module:
    """Return a model of one layer under a scheme."""
    torch.manual_seed(0)
    config = Config(global_quant_config=layer)
    quantizer = ModelQuantizer(config)
    return quantizer.freeze(quantizer.quantize_model(Net(), [torch.randn(8, SIZE)]))


def layouts(model: nn.Module) -> Iterator[str]:
    """Iterate over the layouts of safetensors that can hold a model."""
    for mode in FORMATS:
        with suppress(ValueError):
            make_format(model, None, JsonExporterConfig(), mode)
            yield mode


def gguf_type(layer: QuantizationConfig) -> dict[str, Any] | None:
    """Return the type of blocks that a GGUF file holds a scheme in, with its bits; or None."""
    words = describe_layer(layer)
    if layer.weight is None or words.input or words.output:
        return None
    kind = block_type(layer.weight, SIZE)
    if kind is None:
        return None
    blocks = BLOCK_TYPES[kind]
    return {"type": kind, "bits": 8 * blocks.bytes / blocks.size}


def fits_onnx(layer: QuantizationConfig) -> bool:
    """Whether a graph of ONNX can hold a scheme."""
    try:
        get_container("onnx").check_config([layer])
    except ValueError:
        return False
    return True


def sort_key(name: str) -> tuple[bool, str, int]:
    """Sort key: names of earlier versions last, and ``int4_wo_32`` before ``int4_wo_128``."""
    prefix, _, size = name.rpartition("_")
    by_size = (prefix, int(size)) if size.isdigit() else (name, 0)
    return (name.startswith("w_"), *by_size)


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8", newline="\n")
    print(f"Written to {TABLE}")
