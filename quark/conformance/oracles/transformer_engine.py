"""The reference of NVFP4 in TransformerEngine, which is plain torch.

Its package cannot be imported without libraries of CUDA. The reference is one file, which takes two
base classes and two names of annotations from modules that need them. Empty classes stand for those
while the file is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import nearest, two_level_blocks
from quark.conformance.results import in_blocks, nvfp4_scheme, rounded
from quark.conformance.samples import half_values, usual_values
from quark.torch.numerics.formats import Dtype

PACKAGE = "transformer_engine"
RECIPES = f"{PACKAGE}.pytorch.custom_recipes"
REFERENCE = f"{RECIPES}.reference_nvfp4"
BLOCK = 16


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare values rounded to fp4, and NVFP4 tensors.

    Args:
        every: Take one value of so many.
    """
    reference = _reference()
    fmt = Dtype.fp4.value
    x = half_values(every).float()
    x = x[~x.isnan()]
    x = x[: len(x) // 2 * 2]
    codes = reference.cast_to_fp4x2(x.reshape(1, -1))
    theirs = reference.cast_from_fp4x2(codes, torch.float32)
    yield compare("fp4", "round", rounded(x, fmt), nearest(x, fmt), theirs, x)
    x = usual_values(512, 64)
    quantizer = reference.NVFP4QuantizerRef
    codes, scale = quantizer._quantize_blockwise_reference(
        x, x.abs().max().reshape(1), BLOCK, 1, pow_2_scales=False, eps=0.0
    )
    tensor_scale = x.abs().max() / (fmt.max_value * Dtype.fp8_e4m3.value.max_value)
    elements = reference.cast_from_fp4x2(codes, torch.float32)
    theirs = elements * (scale.float() * tensor_scale).repeat_interleave(BLOCK, -1)
    wanted = two_level_blocks(x.reshape(-1, BLOCK), fmt, Dtype.fp8_e4m3.value)
    yield compare("fp4", "NVFP4", in_blocks(x, nvfp4_scheme()), wanted, theirs, x)


def _reference() -> Any:
    """Return the module of the reference, executed with stand-ins for what needs CUDA.

    Modules of the package that are imported before are put back.
    """
    found = find_spec(PACKAGE)
    assert found is not None and found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations))) / "pytorch" / "custom_recipes"
    stand_ins = {name: _package(name) for name in (PACKAGE, f"{PACKAGE}.pytorch", RECIPES)}
    stand_ins[RECIPES].__path__ = [str(folder)]
    classes: dict[str, Any] = {n: type(n, (), {}) for n in ("QuantizedTensorStorage", "Quantizer")}
    multiplication = {"MMParams": object, "GEMMType": SimpleNamespace(FPROP=None)}
    for name, attributes in {
        f"{PACKAGE}.pytorch.quantized_tensor": classes,
        f"{RECIPES}.gemm": multiplication,
    }.items():
        stand_ins[name] = _package(name)
        vars(stand_ins[name]).update(attributes)
    spec = spec_from_file_location(REFERENCE, folder / "reference_nvfp4.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    before = {name: sys.modules[name] for name in list(sys.modules) if _is_theirs(name)}
    try:
        sys.modules.update(stand_ins | {REFERENCE: module})
        spec.loader.exec_module(module)
    finally:
        for name in [name for name in sys.modules if _is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(before)
    return module


def _is_theirs(name: str) -> bool:
    """Whether a module belongs to the package."""
    return name.partition(".")[0] == PACKAGE


def _package(name: str) -> ModuleType:
    """Return an empty package."""
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    return module
