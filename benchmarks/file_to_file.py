"""Quantization from files to files, beside a copy of the same bytes.

    python benchmarks/file_to_file.py
    python benchmarks/file_to_file.py --blocks 4 --scheme int8_wo --json

The model is a random Llama in bfloat16, of 1.2 GB with 11 blocks. *Copy* reads its files and
writes as many bytes as the output has, with their digests, in the same process. *Torch* quantizes
by operations of torch alone, *kernels* with those that numba compiles. All three run in turns. The
least of each counts: other work, and memory that is new to the machine, only add to it. The *ratio*
is the time of the copy over that with kernels, both in CPU seconds. *All* is everything that the
process takes until the first quantization ends, with kernels that were compiled before, from the
start of the interpreter: CPU seconds, and the high-water mark of resident memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import random_llama
import torch
from measure import MIB, cpu_seconds, in_fresh_process, machine, markdown, peak_memory, say

SCHEMES = ("ptpc_fp8", "int8_wo", "int4_wo_128", "mxfp4_weight_only")
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
BLOCKS = 11
PIECE = 1 << 22  # bytes that are copied at once
COLUMNS = ("scheme", "copy", "torch", "kernels", "ratio", "wall ratio", "all CPU s", "all MiB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", action="append", help="scheme; repeatable")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="decoder blocks")
    parser.add_argument("--rounds", type=int, default=3, help="turns of quantizing and copying")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def write_model(directory: str, blocks: int) -> int:
    """Write the model; return the bytes of its files."""
    return random_llama.write(directory, blocks, SHAPE)


def copy(source: Path, target: Path, size: int) -> None:
    """Read the tensors of a directory, and write ``size`` bytes of them to another."""
    from quark.torch.files import fresh_directory

    with fresh_directory(target) as directory:
        left = size
        with (directory / "model.safetensors").open("wb") as written:
            for path in sorted(source.glob("*.safetensors")):
                with path.open("rb") as read:
                    while piece := read.read(PIECE):
                        written.write(piece[:left])
                        left -= min(left, len(piece))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Run something; return its CPU seconds and its seconds."""
    cpu, start = cpu_seconds(), time.monotonic()
    work()
    return cpu_seconds() - cpu, time.monotonic() - start


def quantize(source: str, scheme_name: str, rounds: int) -> dict[str, Any]:
    """Quantize and copy the model in this process, in turns; return figures."""
    import transformers

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.builder import build_config
    from quark.torch.quantization.config.presets import scheme

    torch.set_num_threads(1)
    assert transformers.LlamaForCausalLM  # imported on use
    quantizer = ModelQuantizer(build_config(scheme(scheme_name), exclude=["lm_head"]))
    copies, everything, peak = [], 0.0, None
    runs: dict[str, list[tuple[float, float]]] = {"auto": [], "torch": []}
    with tempfile.TemporaryDirectory(dir=Path(source).parent) as place:
        out, copied = Path(place) / "out", Path(place) / "copy"
        for turn in range(rounds):
            for kernels, times in runs.items():
                os.environ["QUARK_KERNELS"] = kernels
                times.append(timed(lambda: quantizer.direct_quantize_checkpoint(source, out)))
                if turn == 0 and kernels == "auto":
                    everything, peak = cpu_seconds(), peak_memory()
                size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
                shutil.rmtree(out)
            copies.append(timed(partial(copy, Path(source), copied, size)))
            shutil.rmtree(copied)
    cpu, wall = (min(times) for times in zip(*runs["auto"], strict=True))
    copy_cpu, copy_wall = (min(times) for times in zip(*copies, strict=True))
    return {
        "scheme": scheme_name,
        "copy": copy_cpu,
        "torch": min(cpu for cpu, _ in runs["torch"]),
        "kernels": cpu,
        "ratio": copy_cpu / cpu,
        "wall ratio": copy_wall / wall,
        "all CPU s": everything,
        "all MiB": None if peak is None else peak / MIB,
    }


def main() -> None:
    options = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        source = f"{place}/model"
        size = in_fresh_process("file_to_file.py", "write", source, options.blocks)
        for name in options.scheme or SCHEMES:
            say(name)
            rows.append(
                in_fresh_process("file_to_file.py", "quantize", source, name, options.rounds)
            )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(machine(), end="\n\n")
    title = f"From files to files, {size / 1e9:.2f} GB: CPU seconds"
    print(markdown(title, COLUMNS, ([row[column] for column in COLUMNS] for row in rows)))


WORK = {"write": write_model, "quantize": quantize}

if __name__ == "__main__":
    logging.basicConfig()  # warnings only
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # a measurement: JSON, as in workers
        work, *given = map(json.loads, sys.argv[1:])
        print(json.dumps(WORK[work](*given)))
    else:
        main()
