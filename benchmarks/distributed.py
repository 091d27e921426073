"""Speed of several processes beside one: efficiency and equality of the results.

    python benchmarks/distributed.py
    python benchmarks/distributed.py --algorithm awq --processes 2 --hidden 1024 --json

A random Llama of float32 is quantized by one process and by several, one after the other, in
each round. Every process has one thread. *Speedup* is the time of one process divided by that of
several, the middle of all rounds. *CPU speedup* divides the CPU time of one process by that of the
busiest of several: an upper limit, which other work on the machine does not change. The digests
of all models must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import machine, markdown, say

SCHEMES = {
    "gptq": "int4_wo_128",
    "awq": "uint4_wo_128",
    "yaqa": "int4_wo_128",
    "autoround": "int4_wo_128",
}
VOCABULARY = 1000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=SCHEMES, default="gptq")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # store, rank, count
    return parser.parse_args()


def quantize(options: argparse.Namespace) -> dict[str, Any]:
    """Quantize in this process; return seconds, CPU seconds and a digest of the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.algo import ALGO_CONFIGS
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.presets import scheme

    store, rank, count = options.worker
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 11 // 4,
        "num_hidden_layers": options.blocks,
        "num_attention_heads": options.hidden // 64,
        "vocab_size": VOCABULARY,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    ids = torch.randint(0, VOCABULARY, (options.sequences, options.length))
    config = Config(
        scheme(SCHEMES[options.algorithm]),
        exclude=["lm_head"],
        algo_config=[ALGO_CONFIGS[options.algorithm]()],
    )
    if int(count) > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count)
        )
        torch.distributed.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    ModelQuantizer(config).quantize_model(model, [*ids.split(1)])
    result = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    sha = hashlib.sha256()
    for x in model.state_dict().values():
        sha.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return result | {"digest": sha.hexdigest()}


def run(count: int) -> list[dict[str, Any]]:
    """Return the results of so many processes."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, *sys.argv, "--worker", str(Path(directory) / "store")]
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(count)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(count)
        ]
        return [json.loads(worker.communicate()[0].splitlines()[-1]) for worker in workers]


def main() -> None:
    options = arguments()
    if options.worker:
        print(json.dumps(quantize(options)))
        return
    rounds: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        rounds.append((run(1), run(options.processes)))
    digests = {result["digest"] for one, several in rounds for result in [*one, *several]}
    row = {
        "algorithm": options.algorithm,
        "processes": options.processes,
        "one, s": median(one[0]["seconds"] for one, _ in rounds),
        "several, s": median(max(r["seconds"] for r in several) for _, several in rounds),
        "speedup": median(
            one[0]["seconds"] / max(r["seconds"] for r in several) for one, several in rounds
        ),
        "CPU speedup": median(
            one[0]["cpu"] / max(r["cpu"] for r in several) for one, several in rounds
        ),
        "same bits": "yes" if len(digests) == 1 else "NO",
    }
    if options.json:
        print(json.dumps(row | {"machine": machine()}))
        return
    cells = [f"{value:.2f}" if isinstance(value, float) else value for value in row.values()]
    print(markdown(f"{options.blocks} blocks of width {options.hidden}", list(row), [cells]))


if __name__ == "__main__":
    main()
