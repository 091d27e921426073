"""Memory of algorithms beyond that of the model, by number of blocks and of samples.

    python benchmarks/memory.py
    python benchmarks/memory.py --algorithm gptq --json

Each figure is the high-water mark of resident memory while a random Llama of float32 is quantized,
above the level before, in a process of its own. *Held* is how much of the hidden states between
blocks may stay in memory: all of them in the default setting, which allows 1 GiB, or 4 MiB, so that
most wait on disk. *Padded* samples have masks of their own, which wait with the hidden states.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from measure import MIB, Meter, in_fresh_process, machine, markdown, say

ALGORITHMS = {
    "smoothquant": "int8",
    "autosmoothquant": "int8",
    "awq": "uint4_wo_128",
    "gptq": "int4_wo_128",
    "qronos": "int4_wo_128",
}  # and the scheme of each
USUAL = ("smoothquant", "awq", "gptq")
# glibc: freed memory is given back at once, so that the marks do not depend on chance.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
LENGTH = 128  # tokens of a sample
SMALL = 4  # MiB
# layers, samples, padded, MiB held
CASES = (
    (4, 16, False, SMALL),
    (8, 16, False, SMALL),
    (16, 16, False, SMALL),
    (4, 64, False, SMALL),
    (4, 128, False, SMALL),
    (4, 128, True, SMALL),
    (4, 16, False, None),
    (4, 128, False, None),
)
COLUMNS = ("blocks", "samples", "padded", "held MiB", "model MiB", "hidden MiB")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithm", action="append", choices=ALGORITHMS, help="algorithm; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def samples(count: int, padded: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Iterate over random tokens, (1, LENGTH); each sample has padding of another length."""
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        ids = torch.randint(1, SHAPE["vocab_size"], (1, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[:, : 1 + index % (LENGTH // 2) if padded else 0] = 0
        yield {"input_ids": ids, "attention_mask": mask}


def quantize(
    algorithm: str, blocks: int, count: int, padded: bool, held: int | None
) -> dict[str, float | None]:
    """Quantize a model with an algorithm; return the sizes in MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.pipeline import runner
    from quark.torch.pipeline.activation_store import ActivationStore

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if held is not None:
        runner.ActivationStore = lambda share: ActivationStore(min(share, held * MIB // 2))
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=blocks, **SHAPE)).eval()
    data = list(samples(count, padded))
    template = LLMTemplate.get("llama")
    config = template.get_config(scheme=ALGORITHMS[algorithm], algorithm=algorithm)
    with torch.no_grad():
        model(**data[0])  # what a first pass allocates for good
    with Meter() as meter:
        ModelQuantizer(config).quantize_model(model, data)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "added": meter.added,
        "model": weights / MIB,
        "hidden": count * LENGTH * SHAPE["hidden_size"] * 4 / MIB,
    }


def table(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Measure all cases; return a row for each."""
    rows = []
    for blocks, count, padded, held in CASES:
        row: dict[str, Any] = dict(
            zip(COLUMNS[:4], (blocks, count, "yes" if padded else "no", held or 1024), strict=True)
        )
        for name in names:
            say(f"{blocks} blocks, {count} samples, {name}")
            found = in_fresh_process("memory.py", name, blocks, count, padded, held)
            row |= {"model MiB": found["model"], "hidden MiB": found["hidden"]}
            row[name] = found["added"]
        rows.append(row)
    return rows


def main() -> None:
    options = arguments()
    names = tuple(options.algorithm or USUAL)
    os.environ.update(GIVE_BACK)
    rows = table(names)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(machine(), end="\n\n")
    head = (*COLUMNS, *names)
    title = "Memory added by quantization, MiB"
    print(markdown(title, head, ([row[column] for column in head] for row in rows)))


if __name__ == "__main__":
    logging.basicConfig()  # warnings only
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):  # a measurement: JSON, as in workers
        print(json.dumps(quantize(*map(json.loads, sys.argv[1:]))))
    else:
        main()
