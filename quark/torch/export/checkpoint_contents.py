"""What checkpoints of other tools hold, from their headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import nn

from quark.torch.export.checkpoint.files import Stored
from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.match import config_for

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Part(NamedTuple):
    """A quantized layer, or a tensor that is not quantized.

    Attributes:
        name: Name of the layer or tensor.
        kind: How the layer is quantized: a configuration or the name of a type of GGUF; the type
            of a tensor that is not.
        is_layer: Whether it is a quantized layer.
        elements: Weights of the layer, elements of the tensor.
        bytes: What is stored for the weights of the layer, or the tensor.
        all_bytes: The same with what is stored for inputs and outputs.
    """

    name: str
    kind: QuantizationConfig | str
    is_layer: bool
    elements: int
    bytes: int
    all_bytes: int


def contents(entries: Mapping[str, Stored], fmt: ExportFormat) -> list[Part]:
    """Return what a checkpoint of another tool holds.

    Args:
        entries: Headers by the names of the checkpoint.
        fmt: Its format.

    Returns:
        Layers and tensors. Weights that fill up the last word of a row are counted too.
    """
    stored: dict[str, dict[str, Stored]] = {}
    for key, entry in entries.items():
        layer, _, last = key.rpartition(".")
        stored.setdefault(layer, {})[last] = entry
    found = []
    for name, parts in stored.items():
        states = {fmt.state_name(f"{name}.{last}"): entry for last, entry in parts.items()}
        codes, config = states.get(f"{name}.weight"), config_for(name, nn.Linear, fmt.config)
        scaled = f"{name}.weight_quantizer.scale" in states
        if codes is None or not scaled or config is None or config.weight is None:
            found += [_tensor(f"{name}.{last}", entry) for last, entry in parts.items()]
            continue
        whole = {last: _bytes(entry) for last, entry in parts.items() if last != "bias"}
        others = ("input", "output", "k_scale", "v_scale")
        size = sum(size for last, size in whole.items() if not last.startswith(others))
        count = 8 * _bytes(codes) // config.weight.fmt.bits
        found.append(Part(name, config, True, count, size, sum(whole.values())))
        found += [_tensor(f"{name}.bias", parts["bias"])] if "bias" in parts else []
    return found


def gguf_contents(file: GgufFile) -> list[Part]:
    """Return what a GGUF file holds: the type of its blocks says how a weight is quantized."""
    found = []
    for name, (kind, shape, _, size) in file.tensors.items():
        is_layer = kind not in FLOATS
        layer = name.removesuffix(".weight") if is_layer else name
        found.append(Part(layer, FLOATS.get(kind, kind), is_layer, prod(shape), size, size))
    return found


def _tensor(name: str, entry: Stored) -> Part:
    kind, size = str(entry.dtype).removeprefix("torch."), _bytes(entry)
    return Part(name, kind, False, prod(entry.shape), size, size)


def _bytes(entry: Stored) -> int:
    return prod(entry.shape) * entry.dtype.itemsize
