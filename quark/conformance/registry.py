"""The table of oracles: software that numbers are compared with.

Nothing heavy is imported here, so that the command line can list the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quark.conformance.comparison import Comparison

# Name of the distribution -> "module:function", which compares. The definitions need no other
# software.
DEFINITIONS = "definitions"
ORACLES: dict[str, str] = {
    "definitions": "quark.conformance.oracles.definitions:compare_all",
    "torch": "quark.conformance.oracles.torch:compare_all",
    "ml_dtypes": "quark.conformance.oracles.ml_dtypes:compare_all",
    "gfloat": "quark.conformance.oracles.gfloat:compare_all",
    "onnx": "quark.conformance.oracles.onnx:compare_all",
    "onnxruntime": "quark.conformance.oracles.onnxruntime:compare_all",
    "gguf": "quark.conformance.oracles.gguf:compare_all",
    "compressed-tensors": "quark.conformance.oracles.compressed_tensors:compare_all",
    "torchao": "quark.conformance.oracles.torchao:compare_all",
    "nvidia-modelopt": "quark.conformance.oracles.modelopt:compare_all",
    "microxcaling": "quark.conformance.oracles.microxcaling:compare_all",
    "transformer-engine": "quark.conformance.oracles.transformer_engine:compare_all",
}
# Module that is imported, where it has another name.
_MODULES = {
    "compressed-tensors": "compressed_tensors",
    "nvidia-modelopt": "modelopt",
    "microxcaling": "mx.mx_ops",
    "transformer-engine": "transformer_engine",
}


def is_installed(name: str) -> bool:
    """Whether the software of an oracle can be imported."""
    module = _MODULES.get(name, name)
    if name == DEFINITIONS:
        return True
    return find_spec(module.partition(".")[0]) is not None and find_spec(module) is not None


def version(name: str) -> str:
    """Return the version of the software of an oracle, "" if it does not say."""
    try:
        return "" if name == DEFINITIONS else metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def run(name: str, every: int = 1) -> Iterator[Comparison]:
    """Compare with an oracle.

    Args:
        name: Name in the table.
        every: Take one value of so many where all values of 16-bit floats are compared.
    """
    module, _, attribute = ORACLES[name].partition(":")
    compare_all: Callable[[int], Iterator[Comparison]] = getattr(import_module(module), attribute)
    return compare_all(every)
