"""Time and memory of quantization, as ratios to plain work measured in the same run.

    python benchmarks/speed.py                        # everything, on a model of 254M parameters
    python benchmarks/speed.py --quick                # in two minutes, on a small one
    python benchmarks/speed.py --part tensors --json
    python benchmarks/speed.py --part operations --peer amd-quark --peer torchao
    python benchmarks/speed.py --part peers --peer llm-compressor

Every figure is of one thread, and the median of several rounds. See README.md for the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from statistics import median
from typing import Any

import operations
import peers
from measure import ONE_THREAD, cpu_seconds, in_fresh_process, machine, markdown, middle, say

SCHEMES = (
    "int8_wo",
    "w_int8_per_tensor_sym",
    "int4_wo_per_channel",
    "int4_wo_128",
    "uint4_wo_128",
    "int3_wo_128",
    "int2_wo_128",
    "fp8_wo",
    "ptpc_fp8",
    "bfloat16",
    "int8",
    "fp8",
)
WINDOWS = 4  # of data for static ranges
HIDDEN = (256, 1024, 2048)  # sizes of the models that algorithms solve
PARTS = ("weights", "calibration", "solving", "tensors", "operations", "start", "peers")
START = {
    "import torch": "import torch",
    "import quark.torch": "import torch, quark.torch",
    "a tensor quantized": """
import torch
from quark.torch.numerics.qdq import dynamic_qparams, quantize
from quark.torch.quantization import Int8PerTensorSpec
x, scheme = torch.ones(64, 64), Int8PerTensorSpec(is_dynamic=False).to_quantization_spec().scheme
quantize(x, *dynamic_qparams(x, scheme), scheme)""",
    "a model quantized and frozen": """
import logging, torch
from quark.torch import LLMTemplate, ModelQuantizer
logging.getLogger("quark").addHandler(logging.NullHandler())
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
config = LLMTemplate.get("any").get_config(scheme="int8_wo", exclude_layers=[])
ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))""",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="run this part only; repeatable"
    )
    parser.add_argument("--schemes", help="schemes, separated by commas (default: a few)")
    parser.add_argument(
        "--peer",
        action="append",
        choices=[*peers.PEERS][1:],
        default=[],
        help="also measure this software; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument("--quick", action="store_true", help="small model, small tensors")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def schemes(wanted: str | None) -> tuple[list[str], list[str]]:
    """Return the names of schemes that need no data, and of schemes that need data."""
    from quark.torch.quantization.calibration import needs_data
    from quark.torch.quantization.config import presets

    names = wanted.split(",") if wanted else SCHEMES
    is_static = {name: needs_data([presets.scheme(name)]) for name in names}
    return [n for n in names if not is_static[n]], [n for n in names if is_static[n]]


def weights(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time schemes that need no data, each run in a fresh process."""
    runs = defaultdict(list)
    for i in range(options.rounds):
        for scheme in options.without_data:
            say(f"weights: {scheme}, round {i + 1} of {options.rounds}")
            runs[scheme].append(in_fresh_process("workers.py", "weights", scheme, options.size))
    return [middle(run) for run in runs.values()]


def calibration(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time static calibration in turns with plain passes of the same data."""
    results = []
    for scheme in options.with_data:
        say(f"calibration: {scheme}")
        task = "calibration", scheme, options.size, WINDOWS, options.rounds
        results.append(in_fresh_process("workers.py", *task))
    return results


def solving(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time GPTQ and AWQ beside the arithmetic that they need at least."""
    results = []
    for hidden in HIDDEN[: 1 if options.quick else None]:
        for dtype in ("float32", "bfloat16"):
            say(f"solving: hidden size {hidden}, {dtype}")
            results += in_fresh_process("solving.py", ["gptq", "awq"], hidden, dtype)
    return results


def tensors(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time numeric operations on one tensor in turns with a clone of it."""
    say(f"tensors: {options.edge} × {options.edge}")
    task = "tensors", options.edge, 2 * options.rounds + 1
    return in_fresh_process("workers.py", *task)


def compare_operations(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time operations on one tensor by this package and by others, in turns."""
    names = [peer for peer in options.peer if peer in operations.SOFTWARE]
    pythons = {"quark": sys.executable, **{peer: options.peer_pythons[peer] for peer in names}}
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for i in range(options.rounds):
        for peer, python in pythons.items():
            say(f"operations: {peer}, round {i + 1} of {options.rounds}")
            task = "operations.py", peer, options.edge, options.rounds
            runs[peer].append(in_fresh_process(*task, python=python))
    ours, *theirs = ((peer, middle(run)) for peer, run in runs.items())
    copy, fresh = (ours[1][name] for name in (operations.COPY, operations.FRESH_COPY))
    rows = []
    for name, ms in ours[1].items():
        row = {"operation": name, "ms": ms, "copies": ms / copy, "clones": ms / fresh}
        for peer, found in theirs:
            other = found.get(name)
            row |= {f"{peer}, ms": other, f"{peer}: ours": other and other / ms}
        rows.append(row)
    return rows


def start(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time fresh interpreters up to a first result, in turns with one that imports torch alone."""
    seconds: dict[str, list[float]] = {name: [] for name in START}
    rounds = 3 * options.rounds
    for i in range(rounds + 1):
        say(f"start: round {i} of {rounds}")
        for name, code in START.items():
            begin = cpu_seconds()
            subprocess.run([sys.executable, "-c", code], env=os.environ | ONE_THREAD, check=True)
            if i:
                seconds[name].append(cpu_seconds() - begin)
    base = median(seconds["import torch"])
    return [
        {"until": name, "seconds": median(values), "beyond_torch_s": median(values) - base}
        for name, values in seconds.items()
    ]


def compare_peers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the same work by this package and by others, in turns, each in a fresh process."""
    pythons = {"quark": sys.executable, **options.peer_pythons}
    runs = defaultdict(list)
    for i in range(options.rounds):
        for peer, python in pythons.items():
            say(f"peers: {peer}, round {i + 1} of {options.rounds}")
            for row in in_fresh_process("peers.py", peer, options.size, python=python):
                runs[peer, row["stage"]].append(row)
    rows = [middle(run) for run in runs.values()]
    ours = {row["stage"]: row["cpu_s"] for row in rows if row["peer"] == "quark"}
    return [{**row, "ratio": row["cpu_s"] / ours[row["stage"]]} for row in rows]


MEASURE = {
    "weights": weights,
    "calibration": calibration,
    "solving": solving,
    "tensors": tensors,
    "operations": compare_operations,
    "start": start,
    "peers": compare_peers,
}
TITLES = {
    "weights": "Quantize and freeze a model, against a copy of its weights",
    "calibration": "Static calibration, against plain forward passes of the same data",
    "solving": "GPTQ and AWQ, against the arithmetic of GPTQ",
    "tensors": "Operations on one tensor, in clones of it",
    "operations": "Operations on one tensor, by this package and by others",
    "start": "From the start of the process",
    "peers": "The same work by others: int4 weights in groups of 128",
}
COLUMNS = {
    "weights": {
        "scheme": "scheme",
        "copy_s": "copy, s",
        "quantize_s": "quantize, s",
        "freeze_s": "freeze, s",
        "copies": "copies",
        "added_mib": "added, MiB",
        "largest_layers": "largest layers",
    },
    "calibration": {
        "scheme": "scheme",
        "forward_s": "forward, s",
        "calibration_s": "calibration, s",
        "forwards": "forwards",
        "freeze_s": "freeze, s",
        "forward_mib": "forward adds, MiB",
        "added_mib": "added, MiB",
    },
    "solving": {
        "algorithm": "algorithm",
        "hidden": "hidden size",
        "dtype": "type",
        "forward_s": "forward, s",
        "limit_s": "limit of gptq, s",
        "seconds": "s",
        "forwards": "forwards",
        "ratio": "in limits",
    },
    "tensors": {
        "tensor": "tensor",
        "clone_ms": "clone, ms",
        "range": "range",
        "quantize": "quantize",
        "dequantize": "dequantize",
        "fake": "fake quantize",
        "in_place": "in place",
        "pack": "pack",
        "unpack": "unpack",
    },
    "operations": {
        "operation": "operation",
        "ms": "ms",
        "copies": "in copies",
        "clones": "in clones",
    },
    "start": {"until": "until", "seconds": "s", "beyond_torch_s": "beyond torch, s"},
    "peers": {
        "peer": "software",
        "stage": "up to",
        "cpu_s": "s",
        "ratio": "ratio to ours",
        "added_mib": "added, MiB",
    },
}


def main() -> None:
    options = arguments()
    options.size = "quick" if options.quick else "full"
    options.without_data, options.with_data = schemes(options.schemes)
    options.edge = 1024 if options.quick else 4096
    parts = options.part or [part for part in PARTS if part != "peers" or options.peer]
    options.peer_pythons = {peer: str(peers.environment(peer)) for peer in options.peer}
    results: dict[str, Any] = {"machine": machine()}
    if not options.json:
        print(results["machine"], end="\n\n")
    for part in parts:
        results[part] = rows = MEASURE[part](options)
        columns = COLUMNS[part]
        if part == "operations":
            columns = columns | {
                c: c.replace(" ratio", ": ours") for c in [*rows[0]][len(columns) :]
            }
        if not options.json:
            cells = [[row[column] for column in columns] for row in rows]
            print(markdown(TITLES[part], [*columns.values()], cells), flush=True)
    if options.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
