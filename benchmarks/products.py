"""Products of packed weights alone, beside float layers and other software.

    python benchmarks/products.py --peer torchao --peer onnxruntime
    python benchmarks/products.py --schemes fp8,mxfp4 --runtimes fast --rows 128

The weights are those of the linear layers of four blocks of the model of ``inference.py``. Each
process runs all layers with one row of inputs (a token is generated) and with 128 to 2048 (a prompt
is read), in turns with its float32 layers, which ratios are to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import inference
import torch
from measure import alternate, in_fresh_process, machine, markdown, say

BLOCKS = 4
ROWS = (1, 128, 512, 2048)
SCHEMES = ("int4_wo_128", "w_int8_per_tensor_sym", "fp8")
RUNTIMES = ("fast", "compiled")
Layer = Callable[[torch.Tensor], object]
Figures = dict[str, dict[str, float]]


def write_models(folder: str, schemes: list[str]) -> None:
    """Write a float model of four blocks with a small vocabulary, and the quantized ones."""
    shape = inference.SHAPES["full"] | {"num_hidden_layers": BLOCKS}
    inference.SHAPES["blocks"], inference.VOCABULARY = shape, 1000
    inference.write_models(folder, "blocks", schemes)


def linear_layers(model: Any) -> list[torch.nn.Module]:
    """Return the linear layers of the blocks of a model."""
    layers = model.model.layers.named_modules()
    return [module for name, module in layers if name.endswith("_proj")]


def time_layers(
    processes: dict[str, tuple[Sequence[Layer], torch.dtype]], counts: list[int], rounds: int
) -> Figures:
    """Return CPU milliseconds of all layers for each number of rows, in alternation.

    Args:
        processes: Name -> layers, in the same order, and the type of their inputs.
        counts: Numbers of rows.
        rounds: Number of rounds.
    """
    weights = [layer.weight for layer in processes["float32"][0]]  # type: ignore[attr-defined]
    figures: Figures = {name: {} for name in processes}
    for rows in counts:
        work = {}
        for name, (layers, dtype) in processes.items():
            inputs = [torch.randn(rows, weight.shape[1], dtype=dtype) for weight in weights]
            work[name] = _run(list(zip(layers, inputs, strict=True)), 8 if rows == 1 else 1)
        for name, seconds in alternate(work, rounds).items():
            figures[name][str(rows)] = 1e3 * seconds / (8 if rows == 1 else 1)
    return figures


def _run(calls: Sequence[tuple[Layer, torch.Tensor]], times: int) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        for _ in range(times):
            for layer, x in calls:
                layer(x)

    return run


def float_layers() -> dict[str, tuple[Sequence[Layer], torch.dtype]]:
    """Return layers of the same shapes in float, with random weights, in two types."""
    return {name: (_layers_in(dtype), dtype) for name, dtype in inference.FLOATS.items()}


def _layers_in(dtype: torch.dtype) -> torch.nn.Sequential:
    shape = inference.SHAPES["full"]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    outputs_inputs = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    outputs_inputs += [(inner, hidden), (inner, hidden), (hidden, inner)]
    make = partial(torch.nn.Linear, bias=False, dtype=dtype)
    return torch.nn.Sequential(*(make(i, o) for o, i in outputs_inputs * BLOCKS))


def measure_schemes(
    folder: str, schemes: list[str], runtimes: list[str], counts: list[int], rounds: int
) -> Figures:
    """Measure the runtimes of schemes."""
    from quark.torch.export.recognition import load_checkpoint

    processes = float_layers()
    for scheme in schemes:
        for runtime in runtimes:
            layers = linear_layers(load_checkpoint(f"{folder}/{scheme}", runtime=runtime).eval())
            processes[f"{scheme}, {runtime}"] = layers, torch.bfloat16
    return time_layers(processes, counts, rounds)


def measure_torchao(counts: list[int], rounds: int) -> Figures:
    """Measure the weight-only formats of torchao."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    processes = float_layers()
    int4 = PrototypeInt4WeightOnlyConfig(group_size=inference.GROUP, set_inductor_config=False)
    for name, config in {"int4": int4, "int8": Int8WeightOnlyConfig()}.items():
        layers = _layers_in(torch.bfloat16)
        quantize_(layers, config)
        processes[name] = layers, torch.bfloat16
    return time_layers(processes, counts, rounds)


def measure_onnxruntime(counts: list[int], rounds: int) -> Figures:
    """Measure MatMulNBits of ONNX Runtime with random codes."""
    processes = float_layers()
    weights = [layer.weight for layer in processes["float32"][0]]  # type: ignore[attr-defined]
    for name, level in inference.ONNX_LEVELS.items():
        layers = [_matmul_nbits(*weight.shape, level) for weight in weights]
        processes[name] = layers, torch.float32
    return time_layers(processes, counts, rounds)


def _matmul_nbits(outputs: int, inputs: int, level: int) -> Layer:
    """Return a product with random 4-bit codes in groups."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    groups, generator = inputs // inference.GROUP, np.random.default_rng(0)
    codes = generator.integers(0, 256, (outputs, groups, inference.GROUP // 2), dtype=np.uint8)
    scales = np.full((outputs, groups), 0.01, dtype=np.float32)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        **{"K": inputs, "N": outputs, "bits": 4, "block_size": inference.GROUP},
        accuracy_level=level,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outputs])],
        [numpy_helper.from_array(codes, "codes"), numpy_helper.from_array(scales, "scales")],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return lambda x: session.run(None, {"x": x.numpy()})


def rows_of(label: str, figures: Figures) -> list[list[object]]:
    """Return the rows of a table; ratios are speeds in those of float32."""
    own = figures["float32"]
    return [
        [label, name, *(v for r in row for v in (row[r], own[r] / row[r]))]
        for name, row in figures.items()
    ]


def main() -> None:
    """Print a table of all schemes, runtimes and peers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument(
        "--rows", default=",".join(map(str, ROWS)), help="numbers of rows of inputs"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", choices=["torchao", "onnxruntime"], action="append", default=[])
    flags = parser.parse_args()
    schemes, runtimes = flags.schemes.split(","), flags.runtimes.split(",")
    counts = [int(count) for count in flags.rows.split(",")]
    folder = tempfile.mkdtemp(prefix="products-")
    rows: list[list[object]] = []
    try:
        say("writing models")
        in_fresh_process("products.py", "write", folder, schemes)
        say("quark")
        figures = in_fresh_process(
            "products.py", "schemes", folder, schemes, runtimes, counts, flags.rounds
        )
        rows += rows_of("quark", figures)
        for peer in flags.peer:
            from peers import environment

            say(peer)
            python = environment(peer)
            figures = in_fresh_process("products.py", peer, counts, flags.rounds, python=python)
            rows += rows_of(peer, figures)
    finally:
        shutil.rmtree(folder)
    print(machine(), "\n")
    head = ["software", "weights"]
    head += [c for r in counts for c in (f"{r} rows, ms", ": float32")]
    print(markdown("Products of four blocks", head, rows))


WORKERS: dict[str, Callable[..., object]] = {
    "write": write_models,
    "schemes": measure_schemes,
    "torchao": measure_torchao,
    "onnxruntime": measure_onnxruntime,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("--"):
        torch.set_num_threads(1)
        worker, *arguments = map(json.loads, sys.argv[1:])
        print("\n" + json.dumps(WORKERS[worker](*arguments)))
    else:
        main()
