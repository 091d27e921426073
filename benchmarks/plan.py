"""The plan of ``quark quantize`` beside what runs take: peak memory, disk and time.

    python benchmarks/plan.py
    python benchmarks/plan.py --case llama-512 --json

Each row is a random model in bfloat16. ``quark quantize --plan --json`` says what the run takes,
then the same command runs, each in a process of its own. The peak is the high-water mark of
resident memory; it must stay below the plan and reach 60 % of it. *Bound* is ``--max_memory``, in
parts of what the plan calls the least. *s* is the time that the run itself states, from the plan
on. *CPU s* are its CPU seconds less those of the process that only plans. The planned time is that
of an idle machine, so compare it with these where others work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import MIB, ONE_THREAD, machine, markdown, say

VOCABULARY = 32000
MODELS: dict[str, dict[str, int]] = {
    "llama-256": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8},
    "llama-512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
    "llama-1024": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8},
    "mixtral-512": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
RUNS: dict[str, list[str]] = {
    "rtn": ["int4_wo_64"],
    "fp8": ["fp8"],
    "fp8 cache": ["fp8", "--kv_cache_dtype", "fp8"],
    "awq": ["uint4_wo_64", "--quant_algo", "awq"],
    "gptq": ["int4_wo_64", "--quant_algo", "gptq"],
    "autoround": ["int4_wo_64", "--quant_algo", "autoround"],
    "qronos": ["int4_wo_64", "--quant_algo", "qronos"],
    "gptaq": ["int4_wo_64", "--quant_algo", "gptaq"],
    "yaqa": ["int4_wo_64", "--quant_algo", "yaqa"],
    "finish": ["int4_wo_64", "--finish", "distill"],
}
# Peaks do not depend on the number of steps.
OPTIONS: dict[str, dict[str, Any]] = {"autoround": {"iters": 10}}
DATA = ["--num_calib_data", "16", "--seq_len", "256", "--device", "cpu"]
BOUND = 1.2  # of the least bound
COLUMNS = ("model", "run", "bound", "planned MiB", "peak MiB", "reached", "planned s", "s", "CPU s")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=MODELS, help="model; repeatable")
    parser.add_argument("--run", action="append", choices=RUNS, help="repeatable")
    parser.add_argument("--evaluate", action="store_true", help="measure perplexity too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def write_model(name: str, directory: Path) -> None:
    """Write a random model and a tokenizer."""
    import torch
    from transformers import (
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    from quark.demo.text import model_directory

    torch.manual_seed(0)
    sizes = MODELS[name] | {"num_attention_heads": 8, "num_key_value_heads": 4}
    is_mixture = "num_local_experts" in sizes
    config = (MixtralConfig if is_mixture else LlamaConfig)(vocab_size=VOCABULARY, **sizes)
    model = (MixtralForCausalLM if is_mixture else LlamaForCausalLM)(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(directory)


def quark(*flags: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run ``quark quantize`` in a process of its own; return its peak, CPU time and JSON."""
    command = [sys.executable, __file__, "quantize", *map(str, flags), "--json"]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return json.loads(done.stderr.strip().splitlines()[-1]), json.loads(done.stdout)


def measure(name: str, run: str, model: Path, evaluate: bool) -> list[dict[str, Any]]:
    """Return the rows of a model and a way to quantize it: in memory, and under a bound."""
    rows = []
    least = None
    for bound in (None, BOUND):
        say(f"{name}, {run}, {'in memory' if bound is None else 'bounded'}")
        with tempfile.TemporaryDirectory() as place:
            flags = ["--model_dir", model, "--output_dir", Path(place) / "out", *DATA]
            flags += ["--quant_scheme", *RUNS[run]]
            if run in OPTIONS:
                options = Path(place) / "options.json"
                options.write_text(json.dumps({"name": run} | OPTIONS[run]))
                flags += ["--quant_algo_config_file", options]
            flags += ["--num_eval_data", "8"] if evaluate else ["--skip_evaluation"]
            if bound is not None:
                assert least is not None
                flags += ["--max_memory", str(int(bound * least))]
            planning, plan = quark(*flags, "--plan")
            least = least or plan["least_max_memory"]
            outcome, results = quark(*flags)
        values = (
            name,
            run,
            "" if bound is None else f"{bound * least / MIB:.0f} MiB",
            plan["memory"] / MIB,
            outcome["peak"] / MIB,
            outcome["peak"] / plan["memory"],
            plan["seconds"],
            results["seconds"],
            outcome["CPU s"] - planning["CPU s"],
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        say(f"{rows[-1]}")
    return rows


def main() -> None:
    options = arguments()
    rows = []
    for name in options.case or MODELS:
        with tempfile.TemporaryDirectory() as place:
            model = Path(place) / name
            write_model(name, model)
            for run in options.run or RUNS:
                rows += measure(name, run, model, options.evaluate)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(machine(), end="\n\n")
    print(markdown("Plan beside outcome", COLUMNS, ([row[c] for c in COLUMNS] for row in rows)))


def command_line() -> None:
    """Run the command line, and print the peak of resident memory and the CPU time last."""
    from quark.cli.main import main as run
    from quark.torch.pipeline.machine import peak_memory

    try:
        run()
    finally:
        figures = {"peak": peak_memory(), "CPU s": time.process_time()}
        print(json.dumps(figures), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["quantize"]:
        command_line()
    else:
        main()
