"""Models in memory and read part by part: peak memory and CPU seconds of one run.

    python benchmarks/scale.py
    python benchmarks/scale.py --blocks 8 24 --way gptq --bound 1000 --json

Models are random Llamas in bfloat16 of equal blocks (50 MB each). A run is a process that loads the
model, quantizes it to int4 in groups of 128, and writes it. *Bound* is ``max_memory``; without one
the model is in memory. *Peak* is the high-water mark of resident memory, imports included. *Same*
says whether the files have the bytes of the run in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import random_llama
import torch
from measure import MIB, cpu_seconds, in_fresh_process, machine, markdown, peak_memory, say

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
BLOCKS = (11, 23, 59)  # 0.6, 1.2 and 3 GB
WAYS = ("nearest", "gptq", "awq")
BOUND = 1100  # MiB
WINDOWS, LENGTH = 8, 128
COLUMNS = ("way", "GB", "blocks", "bound MiB", "peak MiB", "CPU s", "same")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="algorithm; repeatable")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="decoder blocks")
    parser.add_argument("--bound", type=int, default=BOUND, help="max_memory in MiB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def write_model(directory: str, blocks: int) -> int:
    """Write a model; return the bytes of its files."""
    return random_llama.write(directory, blocks, SHAPE)


def quantize(source: str, target: str, way: str, bound: int | None) -> dict[str, Any]:
    """Quantize a model in this process; return figures and the digest of the files."""
    from quark.torch import ModelExporter, ModelQuantizer
    from quark.torch.export.recognition import load_checkpoint
    from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
    from quark.torch.quantization.config.builder import build_config
    from quark.torch.quantization.config.presets import scheme

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    data = list(torch.randint(SHAPE["vocab_size"], (WINDOWS, LENGTH), generator=generator).split(1))
    config = build_config(scheme("int4_wo_128"), exclude=["lm_head"])
    config.algo_config = {"nearest": None, "gptq": [GPTQConfig()], "awq": [AWQConfig()]}[way]
    model = load_checkpoint(source, max_memory=None if bound is None else bound * MIB)
    model = ModelQuantizer(config).quantize_model(model, None if way == "nearest" else data)
    ModelExporter(None, target).export_safetensors_model(ModelQuantizer.freeze(model))
    seconds, peak = cpu_seconds(), peak_memory()
    digest = hashlib.sha256((Path(target) / "SHA256SUMS").read_bytes()).hexdigest()
    return {
        "CPU s": seconds,
        "peak MiB": None if peak is None else peak / MIB,
        "digest": digest,
    }


def main() -> None:
    options = arguments()
    rows: list[dict[str, Any]] = []
    for blocks in options.blocks:
        with tempfile.TemporaryDirectory() as place:
            size = in_fresh_process("scale.py", "write", f"{place}/model", blocks)
            for way in options.way or WAYS:
                digests = []
                for bound in (None, options.bound):
                    say(f"{blocks} blocks, {way}, {bound}")
                    target = f"{place}/{way}-{bound}"
                    found = in_fresh_process(
                        "scale.py", "quantize", f"{place}/model", target, way, bound
                    )
                    digests.append(found.pop("digest"))
                    row = {"way": way, "GB": size / 1e9, "blocks": blocks, "bound MiB": bound}
                    rows.append(row | found | {"same": digests[-1] == digests[0]})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(machine(), end="\n\n")
    title = "Models in memory and read part by part, one thread"
    print(markdown(title, COLUMNS, ([row[column] for column in COLUMNS] for row in rows)))


WORK = {"write": write_model, "quantize": quantize}

if __name__ == "__main__":
    logging.basicConfig()  # warnings only
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # a measurement: JSON, as in workers
        work, *given = map(json.loads, sys.argv[1:])
        print(json.dumps(WORK[work](*given)))
    else:
        main()
