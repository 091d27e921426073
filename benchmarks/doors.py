"""The ways into the package: files of each kind, and everything that opens them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYOUTS = ("quark", "awq", "gptq", "compressed-tensors", "fp8")  # of safetensors
MODEL = "params"  # name of the files of save_params


class Door(NamedTuple):
    """A way to open files of one kind.

    Attributes:
        kind: Name of the files, for ``write``.
        open: Opens a directory, digests compared if the second argument is set; returns logits or
            other tensors that a sound load always gives.
        has_digests: Whether it compares digests.
        is_ours: Whether every exception comes from this package.
    """

    kind: str
    open: Callable[[Path, bool], Any]
    has_digests: bool = False
    is_ours: bool = True


def build_float(vocabulary: int = 64) -> Any:
    """Return a small Llama in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocabulary)).eval()


def build_model(kind: str) -> Any:
    """Return a small quantized Llama that files of a kind can hold."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec

    weight = QuantizationSpec(
        "uint4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=False, is_dynamic=False
    )
    layer = QuantizationConfig(weight=weight)
    if kind == "fp8":
        whole = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
        inputs = QuantizationSpec(**whole, is_dynamic=True)
        layer = QuantizationConfig(inputs, weight=QuantizationSpec(**whole, is_dynamic=False))
    model = build_float(2048 if kind == "gguf" else 64)  # tokens of the tokenizer
    config = Config(layer, exclude=["lm_head"])
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))


def write(kind: str, directory: Path) -> None:
    """Write sound files of a kind."""
    from quark.demo.text import model_directory
    from quark.torch import ModelExporter, collect_statistics, save_params, save_statistics
    from quark.torch.digests import write_digests

    exporter = ModelExporter(directory)
    if kind == "float":
        build_float().save_pretrained(directory)
        write_digests(directory)
    elif kind == "statistics":
        save_statistics(collect_statistics(build_float(), [_ids()], 1), directory)
    elif kind == "options":
        directory.mkdir()
        options = {"name": "awq", "scaling_layers": [{"prev_op": "a", "layers": ["b", "c"]}]}
        (directory / "options.json").write_text(json.dumps(options))
    elif kind == "params":
        save_params(build_model(kind), MODEL, export_dir=directory, compressed=True)
    elif kind == "native":
        exporter.export_quark_model(build_model(kind))
    elif kind == "gguf":
        exporter.export_gguf_model(build_model(kind), model_directory(), "model")
    elif kind == "onnx":
        exporter.export_onnx_model(build_model(kind), {"input_ids": _ids()})
    else:
        exporter.export_safetensors_model(
            build_model(kind), custom_mode=kind, max_shard_size="40kB"
        )


def _ids() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(_ids()).logits
    return logits


def _load(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch.export.recognition import load_checkpoint

    return _logits(load_checkpoint(path, check_digests=check_digests))


def _import(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch import ModelImporter

    return _logits(ModelImporter(path, check_digests=check_digests).import_model_info(_empty()))


def _empty() -> Any:
    with torch.device("meta"):
        return build_float()


def _transformers(path: Path, _: bool) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return _logits(AutoModelForCausalLM.from_pretrained(path, local_files_only=True))


def _original(path: Path, _: bool) -> torch.Tensor:
    from quark.torch.report.original_weights import OriginalWeights

    weights = OriginalWeights(path)
    weights.check({"model.layers.0.mlp.up_proj": (96, 64)})
    return torch.cat([w.flatten() for _, w in sorted(weights.weights(Everything()))])


class Everything:
    """A collection that contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


def _params(path: Path, _: bool) -> torch.Tensor:
    from quark.torch import load_params

    files = path / f"{MODEL}.json", path / f"{MODEL}.safetensors"
    return _logits(load_params(None, *files, compressed=True))


def _statistics(path: Path, _: bool) -> torch.Tensor | None:
    from quark.torch import load_statistics

    statistics = load_statistics(path)
    grams = [gram.total for _, gram in sorted(statistics.inputs.items()) if gram.total is not None]
    for mapping in (statistics.ranges, statistics.samples):
        list(mapping.values())
    return torch.cat([gram.flatten() for gram in grams]) if grams else None


def _options(path: Path, _: bool) -> None:
    from quark.torch.quantization.config.algo_lookup import load_quant_algo_config_from_file

    load_quant_algo_config_from_file(path / "options.json")


@cache
def _graph_model() -> Any:
    return build_model("onnx")


def _onnx(path: Path, _: bool) -> None:
    from quark.torch.export.recognition import verify

    verify(path, _graph_model(), inputs={"input_ids": _ids()})


DOORS: dict[str, Door] = {
    "float": Door("float", _load, True),
    "report": Door("float", _original),
    **{layout: Door(layout, _load, True) for layout in LAYOUTS},
    "native": Door("native", _load, True),
    "gguf": Door("gguf", _load, True),
    "importer": Door("quark", _import, True),
    "importer of native": Door("native", _import, True),
    "transformers": Door("quark", _transformers, is_ours=False),
    "params": Door("params", _params),
    "statistics": Door("statistics", _statistics),
    "options": Door("options", _options),
    "onnx": Door("onnx", _onnx),
}
_PACKAGES = {"gguf": "gguf", "onnx": "onnxruntime"}


def available() -> list[str]:
    """Return the names of the doors whose packages are installed."""
    return [name for name, door in DOORS.items() if find_spec(_PACKAGES.get(door.kind, "torch"))]
