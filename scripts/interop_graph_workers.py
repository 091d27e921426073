"""What a client computes from a quantized graph. Run by its Python, without this package.

python interop_graph_workers.py CLIENT GRAPH INPUT.npy OUTPUT.npy
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


def onnxruntime(path: Path, x: Any) -> Any:
    """Run an ONNX file; products of codes are exact."""
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def program(path: Path) -> Any:
    """Return a program of ``torch.export`` with the operators ``quantized_decomposed``."""
    import torch
    import torch.ao.quantization.fx._decomposed  # registers them

    return torch.export.load(path)


def openvino(path: Path, x: Any) -> Any:
    """Run a program whose weights are values."""
    import openvino
    import torch

    graph = openvino.convert_model(program(path), example_input=(torch.from_numpy(x),))
    compiled = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled([x])[0]


def executorch(path: Path, x: Any) -> Any:
    """Lower a program to XNNPACK, all of its layers, and run it."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    lowered = to_edge_transform_and_lower(program(path), partitioner=[XnnpackPartitioner()])
    left = [str(node.target) for node in lowered.exported_program().graph.nodes]
    if any("convolution" in operator or "linear" in operator for operator in left):
        raise ValueError(f"XNNPACK leaves layers: {left}")
    content = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(content)  # reads the content while it runs
    return loaded.load_method("forward").execute([torch.from_numpy(x)])[0].numpy()


CLIENTS = {"onnxruntime": onnxruntime, "openvino": openvino, "executorch": executorch}


if __name__ == "__main__":
    name, graph, given, result = sys.argv[1:]
    np.save(result, np.ascontiguousarray(CLIENTS[name](Path(graph), np.load(given))))
