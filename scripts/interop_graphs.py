"""One quantized graph, run by ONNX Runtime, OpenVINO and XNNPACK: the codes of its outputs.

    python scripts/interop_graphs.py
    python scripts/interop_graphs.py --net mobilenet --python openvino=PATH/bin/python

Networks of ``benchmarks/vision_models.py`` with random weights, and the statistics of a batch in
their batch norms, are quantized in graph mode: int8 on every edge, int8 weights, int32 biases. Each
client gets the same frozen graph by its own way out, in an environment of its own without this
package (``interop.py``), and runs it on other pictures. A row counts the codes of the outputs that
are not those of the frozen graph: at a tie between two codes, sums in another order take either.
The exit status is 1 if a client fails, if one in twenty differs, or one by more than 1. OpenVINO is
not judged so: it leaves out roundings where it fuses a convolution with the sum behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
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
MOST = 0.05  # share of the codes that may differ
FUSES = {"openvino"}  # clients that leave out roundings


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


def write(name: str, folder: Path) -> tuple[torch.Tensor, float]:
    """Write a graph by each way out; return its outputs on other pictures, and their scale."""
    graph, x = frozen_graph(name)
    export_onnx(model=graph, output_dir=folder, input_args=x)
    for file, folds in (("codes.pt2", True), ("values.pt2", False)):
        torch.export.save(export_program(graph, (x,), fold_quantize=folds), folder / file)
    np.save(folder / "x.npy", x.numpy())
    *_, last = edge_modules(graph).values()
    assert last.scale is not None
    with torch.no_grad():
        return graph(x), float(last.scale)


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
    print("| network | codes | client | other codes | largest difference |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name in options.net or NETS:
        with tempfile.TemporaryDirectory() as folder:
            say(f"quantizing: {name}")
            expected, scale = write(name, Path(folder))
            codes = (expected / scale).round()
            for client in FILES:
                found = run(client, pythons[client], Path(folder))
                version = f"{client} {version_of(client, pythons[client])}"
                if isinstance(found, str):
                    say(found)
                    failed, cells = True, "fails | "
                else:
                    difference = ((found / scale).round() - codes).abs()
                    others, largest = int((difference > 0).sum()), int(difference.max())
                    is_same = largest <= 1 and others <= MOST * codes.numel()
                    failed |= not is_same and client not in FUSES
                    cells = f"{others} | {largest}"
                used = f"{codes.numel()} ({codes.unique().numel()} values)"
                print(f"| {name} | {used} | {version} | {cells} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
