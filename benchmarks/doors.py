"""The ways into the package: files of each kind, and everything that opens them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sound_files import (
    ATTENTION,
    COMPRESSED,
    GRAPH,
    LAYERS,
    LAYOUTS,
    MODEL,
    Layers,
    build_float,
    build_float_graph,
    build_graph,
    build_model,
    ids,
    images,
    quantize_blocks,
    rows,
    sequences,
)

# Of the largest logit. Fast products round inputs, scales and outputs to bfloat16: 0.004 for sound
# files of int8 and uint4, up to 0.15 where a damaged scale makes one channel a thousand times
# larger than the others.
FAST = 0.5


Open = Callable[[Path, bool], Any]


class Door(NamedTuple):
    """A way to open files of one kind.

    Attributes:
        kind: Name of the files, for ``write``.
        open: Opens a directory, digests compared if the second argument is set; returns logits or
            other tensors that a sound load always gives.
        has_digests: Whether it compares digests.
        is_ours: Whether every exception comes from this package.
        is_safe: Whether whatever is loaded is the sound result, or the files are refused.
    """

    kind: str
    open: Open
    has_digests: bool = False
    is_ours: bool = True
    is_safe: bool = False


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Return the logits of 64 tokens: every weight takes part, but for larger vocabularies."""
    tokens = torch.arange(64).reshape(2, 32)
    logits: torch.Tensor = model.eval()(tokens).logits
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


@torch.no_grad()
def _layers(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch import ModelImporter

    importer = ModelImporter(path, check_digests=check_digests)
    outputs: torch.Tensor = importer.import_model_info(copy.deepcopy(_empty_layers()))(rows())
    return outputs


@cache
def _empty_layers() -> Any:
    with torch.device("meta"):
        return Layers().eval()


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

    verify(path, _graph_model(), inputs={"input_ids": ids()})


def _agree(first: Open, second: Open, tolerance: float = 0) -> Open:
    """Return a way to open files that expects two ways to refuse them, or to give one result.

    Args:
        first: A way to open files.
        second: The other one.
        tolerance: Largest difference of the results, in parts of the largest value.
    """

    def open_both(path: Path, check_digests: bool) -> Any:
        results = [_try(way, path, check_digests) for way in (first, second)]
        errors = [r for r in results if isinstance(r, Exception)]
        if len(errors) == 1:
            raise AssertionError(f"one way alone refuses: {errors[0]}") from errors[0]
        if errors:
            raise errors[0]
        x, y = results
        same = x.isfinite() == y.isfinite()
        gap = torch.where(same & x.isfinite(), (x - y).abs(), 0)
        limit = tolerance * torch.where(x.isfinite(), x.abs(), 0).max()
        if not bool(same.all()) or bool((gap > limit).any()):
            raise AssertionError(f"the results differ by {float(gap.max())}")
        return x

    return open_both


def _try(way: Open, path: Path, check_digests: bool) -> Any:
    try:
        return way(path, check_digests)
    except (ValueError, OSError) as error:
        return error


def _stream(path: Path, check_digests: bool) -> torch.Tensor:
    """Open a model whose tensors are read when they are used, and dropped after."""
    from quark.torch.export.recognition import load_checkpoint

    model = load_checkpoint(path, check_digests=check_digests, max_memory=1 << 40)
    return _logits(_without_room(model))


def _in_float(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch.export.recognition import load_in_float

    return _logits(load_in_float(path, check_digests=check_digests))


def _stream_in_float(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch.export.recognition import load_in_float

    model = load_in_float(path, check_digests=check_digests, max_memory=1 << 40)
    return _logits(_without_room(model))


def _without_room(model: Any) -> Any:
    from quark.torch.graph.residency import residency_of

    residency: Any = residency_of(model)
    residency.limit = 0
    return model


def _fast(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch.export.recognition import load_checkpoint

    return _logits(load_checkpoint(path, check_digests=check_digests, runtime="fast"))


def _quantize_files(path: Path, _: bool) -> torch.Tensor:
    """Quantize files without a model in memory; of a failure, nothing may be left."""
    from quark.torch.export.containers.base import ExportSettings
    from quark.torch.export.file_to_file import quantize_files

    return _written(path, lambda to: quantize_files(_int8(), path, to, ExportSettings()))


def _quantize_model(path: Path, _: bool) -> torch.Tensor:
    """Do the same with the model in memory."""
    from quark.torch import ModelExporter, ModelQuantizer
    from quark.torch.export.recognition import load_in_float

    def write(target: Path) -> None:
        model = ModelQuantizer(_int8()).quantize_model(load_in_float(path))
        ModelExporter(target).export_safetensors_model(ModelQuantizer.freeze(model))

    return _written(path, write)


def _written(path: Path, write: Callable[[Path], Any]) -> torch.Tensor:
    """Return the bytes of the tensors that a function writes beside files."""
    place = path.with_name(f"{path.name}-written")
    place.mkdir()
    try:
        write(place / "out")
        files = sorted((place / "out").glob("*.safetensors"))
        data = b"".join(file.read_bytes() for file in files)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).float()
    except (ValueError, OSError):
        left = [file.name for file in place.iterdir()]
        if left:
            raise AssertionError(f"a failure leaves {left}") from None
        raise
    finally:
        shutil.rmtree(place)


def _int8() -> Any:
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec

    weight = QuantizationSpec(
        "int8", qscheme="per_channel", ch_axis=0, symmetric=True, is_dynamic=False
    )
    return Config(QuantizationConfig(weight=weight), exclude=["lm_head"], log_severity_level=3)


def _archive(path: Path, check_digests: bool) -> Any:
    from quark.torch import load_params

    file = path / f"{MODEL}_quantized.pth"
    graph = load_params(pth_path=file, quant_mode=GRAPH, check_digests=check_digests)
    return _run_graph(graph)


def _program(path: Path, _: bool) -> Any:
    """Quantize the graph of a program."""
    from quark.torch.export.graph_archive import load_graph_archive

    graph = load_graph_archive(path / "model.pt2")
    return _run_graph(build_graph(graph))


@torch.no_grad()
def _run_graph(graph: Any) -> Any:
    """Return the outputs of a graph; None if torch refuses to run it, as it may another graph."""
    try:
        return graph(images())
    except Exception:
        return None


@torch.no_grad()
def _graph(path: Path, check_digests: bool) -> torch.Tensor:
    from quark.torch import ModelImporter

    importer = ModelImporter(path, check_digests=check_digests)
    outputs: torch.Tensor = importer.import_model_info(_float_graph())(images())
    return outputs


@cache
def _float_graph() -> Any:
    return build_float_graph()


@torch.no_grad()
def _journal(path: Path, _: bool) -> torch.Tensor:
    """Go on with a run in a copy: the journal would be complete after that."""
    copied = path.with_name(f"{path.name}-copy")
    shutil.copytree(path, copied)
    try:
        outputs: torch.Tensor = quantize_blocks(copied)(sequences())
        return outputs
    finally:
        shutil.rmtree(copied)


_LAYOUT_DOORS = {
    f"{kind} {name}": Door(kind, _agree(*ways), True)
    for kind in (*LAYOUTS, "fp8 blocks", "native")
    for name, ways in {
        "in parts": (_load, _stream),
        "in float": (_in_float, _stream_in_float),
        "fast": (_load, _fast, FAST),
    }.items()
}
_FILE_DOORS = {
    f"{kind} to files": Door(kind, _agree(_quantize_files, _quantize_model))
    for kind in ("float", *LAYOUTS, "fp8 blocks")
}
_COMPRESSED_DOORS = {
    f"compressed {name.removeprefix('compressed ')}": Door(name, _agree(_load, _stream), True)
    for name in COMPRESSED
}
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
    "float in parts": Door("float", _agree(_load, _stream), True),
    **_LAYOUT_DOORS,
    **_FILE_DOORS,
    **_COMPRESSED_DOORS,
    **{kind: Door(kind, _layers, True) for kind in LAYERS},
    **{kind: Door(kind, _load, True) for kind in ATTENTION},
    **{f"{kind} in parts": Door(kind, _agree(_load, _stream), True) for kind in ATTENTION},
    "gguf in float": Door("gguf", _agree(_in_float, _stream_in_float), True),
    "k-quants": Door("k-quants", _agree(_in_float, _stream_in_float)),
    "k-quants packed": Door("k-quants", _agree(_load, _stream)),
    "archive": Door("archive", _archive, True),
    "program": Door("program", _program),
    "graph": Door("graph", _graph, True),
    "journal": Door("journal", _journal, is_safe=True),
    "int8 fast": Door("int8", _agree(_load, _fast, FAST), True),
}
_PACKAGES = {"gguf": "gguf", "k-quants": "gguf", "onnx": "onnxruntime"}


def available() -> list[str]:
    """Return the names of the doors whose packages are installed."""
    return [name for name, door in DOORS.items() if find_spec(_PACKAGES.get(door.kind, "torch"))]
