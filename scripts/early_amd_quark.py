"""AMD Quark 0.9 and 0.10, which were made for an earlier torch, on the tested one.

They import modules that torch has moved or no longer has, and compile kernels on import. Quantizers
of linear layers use none of them: empty modules stand for what is missing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

MOVED = {"torch.onnx._internal.jit_utils": "torch.onnx._internal.torchscript_exporter.jit_utils"}
MISSING = (  # torch had the first two for graph mode; the others are for ONNX
    *("torch.ao.quantization.pt2e", "torch.ao.quantization.quantizer"),
    *("onnxruntime_extensions", "onnxruntime_genai", "onnxsim"),
)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {  # of weights and of inputs
    "int8, int8 inputs": ({"dtype": "int8"}, {"dtype": "int8"}),
    "int8 per channel": ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}, None),
    "int4, groups of 32": (
        {"dtype": "int4", "qscheme": "per_group", "ch_axis": 1, "group_size": 32},
        None,
    ),
    "uint4 with offsets, groups of 32": (
        {**{"dtype": "uint4", "qscheme": "per_group", "symmetric": False}, "group_size": 32},
        None,
    ),
    "fp8, fp8 inputs": ({"dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3"}),
}


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the missing modules; each has every name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == given or name.startswith(f"{given}.") for given in MISSING):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def prepare() -> None:
    """Let AMD Quark 0.9 and 0.10 be imported."""
    import torch.utils.cpp_extension

    for name, place in MOVED.items():
        sys.modules[name] = importlib.import_module(place)
    sys.meta_path.append(_EmptyModules())
    torch.utils.cpp_extension.load = MagicMock(side_effect=OSError("no kernels"))
    importlib.import_module("quark.torch")


def write(source: Path, folder: Path, calibration: list[list[int]]) -> list[tuple[str, Path]]:
    """Write the model of a directory in all kinds."""
    prepare()
    import torch
    from transformers import AutoModelForCausalLM

    quark: Any = importlib.import_module("quark.torch")
    options: Any = importlib.import_module("quark.torch.export.config.config")
    batches, written = [torch.tensor([ids]) for ids in calibration], []
    for kind in KINDS:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        config, path = configuration(kind), folder / kind.replace(" ", "-")
        model = quark.ModelQuantizer(config).quantize_model(model, batches)
        how = options.ExporterConfig(json_export_config=options.JsonExporterConfig())
        exporter = quark.ModelExporter(config=how, export_dir=path)
        exporter.export_safetensors_model(quark.ModelQuantizer.freeze(model), quant_config=config)
        written.append((kind, path))
    return written


def read(path: Path) -> Any:
    """Return the model of a checkpoint; ``prepare`` was called."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    quark: Any = importlib.import_module("quark.torch")
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    importer = quark.ModelImporter(model_info_dir=str(path), saved_format="safetensors")
    return importer.import_model_info(model)


def configuration(kind: str) -> Any:
    """Return the configuration of a kind, for all layers but the head."""
    config: Any = importlib.import_module("quark.torch.quantization.config.config")
    weight, inputs = KINDS[kind]
    layer = config.QuantizationConfig(
        weight=_specification(**weight),
        input_tensors=None if inputs is None else _specification(**inputs),
    )
    return config.Config(global_quant_config=layer, exclude=["lm_head"])


def _specification(dtype: str, qscheme: str = "per_tensor", **fields: Any) -> Any:
    """Return a static specification with ranges from smallest and largest values."""
    config: Any = importlib.import_module("quark.torch.quantization.config.config")
    types: Any = importlib.import_module("quark.torch.quantization.config.type")
    observers: Any = importlib.import_module("quark.torch.quantization.observer.observer")
    observer = "".join(part.capitalize() for part in qscheme.split("_")) + "MinMaxObserver"
    if qscheme == "per_group":
        fields = {"ch_axis": 1, **fields}
    return config.QuantizationSpec(
        dtype=types.Dtype[dtype],
        observer_cls=getattr(observers, observer),
        qscheme=types.QSchemeType[qscheme],
        **{"symmetric": True, "is_dynamic": False, **fields},
        scale_type=types.ScaleType.float,
        round_method=types.RoundType.half_even,
    )
