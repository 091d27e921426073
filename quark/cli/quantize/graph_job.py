"""The steps of ``quark quantize`` for a graph.

The graph is a file ``.pt2`` of ``torch.export.save``, or the graph of a model that a Python
function builds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark.cli import console
from quark.cli.options import in_words
from quark.cli.process_group import rank
from quark.cli.quantize.config import make_config, needs_data
from quark.cli.quantize.flags import AlgorithmFlags
from quark.cli.quantize.graph_flags import GraphFlags
from quark.cli.quantize.model_checks import check_patterns
from quark.cli.quantize.python_entry import build_graph
from quark.cli.quantize.request import Request
from quark.cli.quantize.scheme_flags import SchemeFlags

if TYPE_CHECKING:
    from torch import fx

    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.graph import ShiftLimits

_SAMPLES, _ONNX = ".safetensors", "onnx"
# Flags that graphs have a use for, beside those of schemes and algorithms.
_USED = {
    *("model_dir", "output_dir", "overwrite", "dataset", "num_calib_data", "batch_size"),
    *("offload_dir", "device", "skip_evaluation", "trust_remote_code", "json"),
    *("model_export", "verify"),
    *(field.name for field in fields(GraphFlags)),
}

_NOT_IN_GRAPHS = {
    *("statistics", "kv_cache_dtype", "attention_scheme", "fp8_attention_quant", "finish"),
}


def run_graph(request: Request) -> None:
    """Quantize a graph and write it: an archive, ``NAME_quantized.pth``, or ONNX.

    Raises:
        ImportError: A package that writes ONNX is missing.
        typer.BadParameter: A flag has a wrong value, or does not apply to graphs.
        ValueError: The archive could run code, or the configuration does not fit. Nothing is
            written.
    """
    from quark.torch.export.graph_archive import load_graph_archive
    from quark.torch.files import check_vacant
    from quark.torch.quantization.api import ModelQuantizer

    _check(request)
    check_vacant(request.output_dir, request.overwrite)
    config = _graph_config(request)
    data = _read_samples(request) if needs_data(config) or request.dataset else None
    with console.stage("loading the graph", spinner=True):
        if request.entry is None:
            graph = load_graph_archive(request.model_dir)
        else:
            batch = data[0] if data else None
            graph = build_graph(request.entry, request.trust_remote_code, batch)
    config = check_patterns(request, graph, config)
    quantizer = ModelQuantizer(config, offload_dir=request.offload_dir)
    start = time.monotonic()
    with console.stage("quantizing"):
        quantized = quantizer.quantize_model(graph, data)
        frozen = quantizer.freeze(quantized)
    if rank() > 0:
        return
    with console.stage("writing"):
        write = _write_onnx if _ONNX in _exports(request) else _write_archive
        written, seconds = str(write(request, frozen, data)), time.monotonic() - start
    rows = {"output": escape(written), "time": f"{seconds:.1f} s"}
    console.out.print("", console.facts(rows))
    if request.json:
        console.as_json({"output": written, "seconds": seconds})


def _write_archive(request: Request, graph: fx.GraphModule, data: list[Any] | None) -> Path:
    """Write a frozen graph as an archive of ``torch.export``; return the file."""
    from quark.torch.export.graph_archive import graph_archive
    from quark.torch.files import fresh_directory
    from quark.torch.quantization.graph_mode.inputs import example_arguments

    archive = graph_archive(graph, *example_arguments(graph, data))
    name = f"{request.model_dir.stem.rpartition(':')[2]}_quantized.pth"
    with fresh_directory(request.output_dir, request.overwrite, len(archive)) as directory:
        (directory / name).write_bytes(archive)
    return request.output_dir / name


def _write_onnx(request: Request, graph: fx.GraphModule, data: list[Any] | None) -> Path:
    """Write a frozen graph as ONNX; return the file."""
    from quark.torch.export.api import ModelExporter
    from quark.torch.quantization.graph_mode.inputs import example_arguments

    args, kwargs = example_arguments(graph, data)
    named = dict(zip(signature(graph.forward).parameters, args, strict=False))
    exporter = ModelExporter(None, request.output_dir, request.overwrite, request.verify)
    exporter.export_onnx_model(graph, named | kwargs)
    if exporter.verdict is not None:
        console.out.print(f"  verified: {escape(str(exporter.verdict))}")
    return request.output_dir / "quark_model.onnx"


def _exports(request: Request) -> list[str]:
    """Return the containers that are asked for; none for an archive."""
    return request.exports if "model_export" in request.given else []


def _check(request: Request) -> None:
    """Check that the file exists and that the flags apply to graphs.

    Raises:
        typer.BadParameter: It does not exist, or a flag does not apply.
    """
    if request.entry is None and not request.model_dir.is_file():
        raise console.wrong("--model_dir", f"{request.model_dir} does not exist.")
    schemes = {field.name for flags in (SchemeFlags, AlgorithmFlags) for field in fields(flags)}
    for name in sorted(request.given - _USED - (schemes - _NOT_IN_GRAPHS)):
        raise console.wrong(f"--{name}", "does not apply to a graph. Leave it out.")
    if _exports(request) not in ([], [_ONNX]):
        raise console.wrong(
            "--model_export",
            "a graph is written as an archive, or with --model_export onnx as ONNX.",
        )
    if request.verify and not _exports(request):
        raise console.wrong("--verify", "it opens ONNX: give --model_export onnx, too.")
    if request.dataset is not None and Path(request.dataset).suffix != _SAMPLES:
        raise console.wrong("--dataset", _EXPECTED.format(request.dataset))


_EXPECTED = (
    "expected a .safetensors file with a tensor of samples for each input of the graph, got {}."
)


def _graph_config(request: Request) -> Config:
    """Return the configuration of a request, in graph mode."""
    from quark.torch.quantization.config.graph import PassOptions
    from quark.torch.quantization.config.type import QuantizationMode

    config = make_config(request, "")
    exclude = config.exclude
    if request.excluded is None and request.config is None:
        exclude = [pattern for pattern in exclude if pattern != "lm_head"]
    if request.shift_limits is not None:
        config = replace(config, shift_limits=_read_limits(request.shift_limits))
    names = [f.name for f in fields(PassOptions) if f.name in request.given]
    passes = {name: getattr(request, name) for name in names}
    if passes:
        options = replace(config.pass_options or PassOptions(), **passes)
        config = replace(config, pass_options=options)
    return replace(config, exclude=exclude, quant_mode=QuantizationMode.fx_graph_mode)


def _read_limits(text: str) -> ShiftLimits:
    """Return the limits that ``--shift_limits`` gives; those that it leaves out are the defaults.

    Raises:
        typer.BadParameter: The text is none, or a limit is not a pair of integers in order.
    """
    from quark.torch.quantization.config.graph import ShiftLimits

    names = in_words(field.name for field in fields(ShiftLimits))
    limits: dict[str, tuple[int, int]] = {}
    for part in () if text == "default" else text.split(","):
        match = re.fullmatch(r"\s*(\w+)=(-?\d+):(-?\d+)\s*", part)
        if match is None or not hasattr(ShiftLimits, match[1]):
            expected = f"default, or NAME=SMALLEST:LARGEST with commas, NAME one of {names}"
            raise console.wrong("--shift_limits", f"expected {expected}, got {part.strip()!r}.")
        limits[match[1]] = int(match[2]), int(match[3])
    try:
        return ShiftLimits(**limits)
    except ValueError as error:
        raise console.wrong("--shift_limits", str(error)) from None


def _read_samples(request: Request) -> list[dict[str, Any]]:
    """Return the samples of ``--dataset`` in batches.

    Raises:
        typer.BadParameter: There is no file, or its tensors do not have the same number of rows.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if request.dataset is None:
        raise console.wrong(
            "--dataset", "this scheme needs samples: " + _EXPECTED.format("nothing")
        )
    path = Path(request.dataset)
    if not path.is_file():
        raise console.wrong("--dataset", f"{path} does not exist.")
    try:
        samples = load_file(path)
    except (OSError, SafetensorError) as error:
        raise console.wrong("--dataset", f"{path} cannot be read: {error}") from None
    rows = {len(x) if x.dim() else 0 for x in samples.values()}
    if len(rows) != 1 or not rows - {0}:
        raise console.wrong("--dataset", f"the tensors of {path} have {sorted(rows)} rows.")
    count = min(rows.pop(), request.num_calib_data)
    return list(_batches(samples, count, request.batch_size))


def _batches(samples: dict[str, Any], count: int, size: int) -> Iterator[dict[str, Any]]:
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield {name: tensor[start:stop] for name, tensor in samples.items()}
