"""One quantized graph, run by ONNX Runtime, OpenVINO and XNNPACK: the codes of its outputs.

    python scripts/interop_graphs.py
    python scripts/interop_graphs.py --net mobilenet --python openvino=PATH/bin/python

Networks of ``benchmarks/vision_models.py`` with random weights, and the statistics of a batch in
their batch norms, are quantized in graph mode: int8 on every edge, int8 weights, int32 biases. Each
client gets the same frozen graph by its own way out, in an environment of its own without this
package (``interop.py``), and runs it on other pictures. A row counts the codes of the outputs that
are not those of the frozen graph: at a tie between two codes, sums in another order take either.
The exit status is 1 if a client fails, if one in twenty differs, or one by more than 1. OpenVINO is
not judged so: it leaves out roundings where it fuses a convolution with the sum after it, and on
x86 without VNNI its sums of 8-bit products saturate (``docs/graph-mode.md``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interop import OFFLINE
from interop_clients import ROOT, environment, installed, say, version_of

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export import export_program
from quark.torch.quantization.config.config import (
    Config,
    PassOptions,
    QuantizationConfig,
    QuantizationSpec,
)
from quark.torch.quantization.graph_mode.edges import edge_modules

sys.path.insert(0, str(ROOT / "benchmarks"))
import vision_models

NETS = {  # name -> the network, and the side of its pictures
    "resnet": (vision_models.resnet, 24),
    "mobilenet": (vision_models.mobilenet, 24),
    "segmenter": (vision_models.Segmenter, 32),
    "detector": (vision_models.Detector, 32),
}
FILES = {  # client -> what it opens
    "onnxruntime": "quark_model.onnx",
    "openvino": "values.pt2",
    "executorch": "codes.pt2",
}
CALIBRATION, PICTURES = 4, 32  # batches, and pictures of one
MOST = 0.05  # share of the codes that may differ by one
MOVE, MOVES = 2.0**-20, 3  # relative move of values before roundings, and number of draws


@dataclass(frozen=True)
class Codes:
    """Codes that differ from those of a frozen graph.

    Attributes:
        others: Number of them.
        largest: Largest difference.
    """

    others: int
    largest: int

    def __str__(self) -> str:
        return f"{self.others}, by {self.largest}" if self.others else "0"


def frozen_graph(name: str) -> tuple[Any, torch.Tensor]:
    """Return a frozen graph, and pictures that did not calibrate it."""
    build, side = NETS[name]
    torch.manual_seed(0)
    net = build()
    batches = [torch.rand(PICTURES, 1, side, side) for _ in range(CALIBRATION + 1)]
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        net.train()(batches[0])
    int8, int32 = (
        QuantizationSpec(
            dtype,  # type: ignore[arg-type]  # names stand for their members
            observer_cls="PerTensorMinMaxObserver",  # type: ignore[arg-type]
            qscheme="per_tensor",  # type: ignore[arg-type]
            symmetric=True,
            is_dynamic=False,
        )
        for dtype in ("int8", "int32")
    )
    config = Config(
        QuantizationConfig(int8, int8, int8, int32),
        quant_mode="fx_graph_mode",  # type: ignore[arg-type]
        exclude=[],
        pass_options=PassOptions(),
        log_severity_level=3,  # type: ignore[arg-type]
    )
    quantizer = ModelQuantizer(config)
    graph = torch.export.export(net.eval(), (batches[0],)).module()
    quantized = quantizer.quantize_model(graph, batches[:CALIBRATION])
    return quantizer.freeze(quantized.eval()), batches[CALIBRATION]


def write(name: str, folder: Path) -> tuple[torch.Tensor, float, Codes]:
    """Write a graph by each way out; return outputs on other pictures, their scale, and ties."""
    graph, x = frozen_graph(name)
    export_onnx(model=graph, output_dir=folder, input_args=x)
    for file, folds in (("codes.pt2", True), ("values.pt2", False)):
        torch.export.save(export_program(graph, (x,), fold_quantize=folds), folder / file)
    np.save(folder / "x.npy", x.numpy())
    *_, last = edge_modules(graph).values()
    assert last.scale is not None
    with torch.no_grad():
        y, scale = graph(x), float(last.scale)
    return y, scale, ties(graph, x, y, scale)


def ties(graph: Any, x: torch.Tensor, y: torch.Tensor, scale: float) -> Codes:
    """Return the codes of a graph that differ when values before roundings move by ``MOVE``."""
    generator = torch.Generator().manual_seed(0)

    def move(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        signs = torch.randint(2, args[0].shape, generator=generator) * 2 - 1
        return (args[0] * (1 + MOVE * signs),)

    modules = [graph.get_submodule(name) for name in edge_modules(graph)]
    hooks = [module.register_forward_pre_hook(move) for module in modules]
    with torch.no_grad():
        draws = [compare(graph(x), y, scale) for _ in range(MOVES)]
    for hook in hooks:
        hook.remove()
    return Codes(max(d.others for d in draws), max(d.largest for d in draws))


def compare(found: torch.Tensor, expected: torch.Tensor, scale: float) -> Codes:
    """Return the codes of outputs that are not those of others."""
    difference = ((found / scale).round() - (expected / scale).round()).abs()
    return Codes(int((difference > 0).sum()), int(difference.max()))


def run(client: str, python: Path, folder: Path) -> torch.Tensor | str:
    """Return the outputs of a client, or the end of what it printed when it failed."""
    script, result = Path(__file__).parent / "interop_graph_workers.py", folder / f"{client}.npy"
    done = subprocess.run(
        [python, script, client, folder / FILES[client], folder / "x.npy", result],
        env=os.environ | OFFLINE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return torch.from_numpy(np.load(result)) if done.returncode == 0 else done.stdout[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--net", action="append", choices=NETS, help="network; repeatable")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=installed,
        metavar="CLIENT=PATH",
        help="the Python that has a client, instead of an environment made here",
    )
    options = parser.parse_args()
    pythons = {
        client: environment(client) for client in FILES if client not in dict(options.python)
    }
    pythons |= dict(options.python)
    failed = False
    print("| network | codes | ties | client | other codes |")
    print("| --- | ---: | ---: | --- | ---: |")
    for name in options.net or NETS:
        with tempfile.TemporaryDirectory() as folder:
            say(f"quantizing: {name}")
            expected, scale, moved = write(name, Path(folder))
            used = f"{expected.numel()} ({(expected / scale).round().unique().numel()} values)"
            for client in FILES:
                found = run(client, pythons[client], Path(folder))
                version = f"{client} {version_of(client, pythons[client])}"
                if isinstance(found, str):
                    say(found)
                    failed, cell = True, "fails"
                else:
                    codes = compare(found, expected, scale)
                    is_tie = codes.others <= moved.others and codes.largest <= moved.largest
                    few = codes.largest <= 1 and codes.others <= MOST * expected.numel()
                    failed, cell = failed or not (is_tie or few), str(codes)
                print(f"| {name} | {used} | {moved} | {version} | {cell} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
