"""Damaged checkpoints of every readable format: each is refused with a clear error, or loaded.

    python benchmarks/fuzz.py --rounds 500 [--seed 0] [--formats gptq gguf]

A round takes a small checkpoint, changes bytes, lengths or values of one of its files, and opens
it. ValueError and OSError are clear refusals; any other error, more than LIMIT_SECONDS, more than
LIMIT_BYTES of memory (where the system tells) or the end of the process that opens it is a defect,
which is printed with the round that repeats it.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import shutil
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from measure import peak_memory

LIMIT_SECONDS, LIMIT_BYTES = 20, 1 << 30
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HOSTILE: list[Any] = [
    None, True, 0, -1, -128, 7, 1 << 31, 10**30, 0.5, float("nan"), "", "x", "../x", "/etc/passwd",
    [], [[]], [None], ["re:(a|b)+$"], {}, {"a": 1}, {"0": {}}, "int4", "fp8_e4m3", "per_group", 128,
]  # fmt: skip
OUTCOMES = ("refused", "loaded", "defect")
FORMATS = ("quark", "native", "awq", "gptq", "compressed-tensors", "fp8", "gguf")


def build_model(mode: str) -> torch.nn.Module:
    """Return a small quantized Llama that a format can hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec

    torch.manual_seed(0)
    tokens = 2048 if mode == "gguf" else 64  # those of the tokenizer
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=tokens)).eval()
    weight = QuantizationSpec(
        "uint4", qscheme="per_group", ch_axis=-1, group_size=32, symmetric=False, is_dynamic=False
    )
    layer = QuantizationConfig(weight=weight)
    if mode == "fp8":
        whole = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}
        inputs = QuantizationSpec(**whole, is_dynamic=True)
        layer = QuantizationConfig(inputs, weight=QuantizationSpec(**whole, is_dynamic=False))
    config = Config(layer, exclude=["lm_head"])
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))


def write_checkpoint(mode: str, directory: Path) -> None:
    """Write a sound checkpoint."""
    from quark.demo.text import model_directory
    from quark.torch import ModelExporter

    model, exporter = build_model(mode), ModelExporter(directory)
    if mode == "native":
        exporter.export_quark_model(model)
    elif mode == "gguf":
        exporter.export_gguf_model(model, model_directory(), "model")
    else:
        exporter.export_safetensors_model(model, custom_mode=mode, max_shard_size="40kB")


def change_json(data: Any, chance: random.Random) -> Any:
    """Return JSON with one value somewhere in it replaced, removed or renamed."""
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(inner, (dict, list)):
                visit(inner)

    visit(data)
    holder, key = chance.choice(places)
    if chance.random() < 0.2:
        del holder[key]
    elif chance.random() < 0.1 and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder[key] = chance.choice(HOSTILE)
    return data


def change_bytes(data: bytearray, chance: random.Random) -> bytearray:
    """Return a file cut, grown, or with some of its first bytes or numbers changed."""
    kind, early = chance.random(), min(len(data), chance.choice([16, 256, 4096, len(data)]))
    at = chance.randrange(max(early, 1))
    if kind < 0.2:
        return data[:at]
    if kind < 0.3:
        return data + bytes(chance.randrange(64))
    if kind < 0.6 and at + 8 <= len(data):
        huge = chance.choice([0, 1, 255, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
        struct.pack_into("<Q", data, at, huge)
        return data
    for _ in range(chance.choice([1, 1, 4, 64])):
        data[chance.randrange(early)] = chance.randrange(256)
    return data


def damage(directory: Path, chance: random.Random) -> str:
    """Change one file of a checkpoint and return its name."""
    files = sorted(f for f in directory.iterdir() if f.name != "generation_config.json")
    file = chance.choice(files)
    if file.suffix == ".json" and chance.random() < 0.85:
        sound = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(change_json(sound, chance)))
    elif chance.random() < 0.05:
        file.unlink()
    else:
        file.write_bytes(change_bytes(bytearray(file.read_bytes()), chance))
    return file.name


def open_damaged(directory: Path) -> str:
    """Open a checkpoint and return the outcome: refused, loaded, or the defect."""
    from quark.torch.export.recognition import open_checkpoint

    before = peak_memory()
    try:
        open_checkpoint(directory).fill()
        outcome = "loaded"
    except (ValueError, OSError) as error:
        outcome = "refused" if str(error).strip() else f"no message: {type(error).__name__}"
    except Exception as error:  # whatever else it raises is a defect
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"
    grown = (peak_memory() or 0) - (before or 0)
    return f"{grown >> 20} MB of memory" if grown > LIMIT_BYTES else outcome


def serve(directory: Path | None, pipe: Connection) -> None:
    """Open a sound checkpoint, then each requested one, and answer with its outcome."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    while directory:
        pipe.send(open_damaged(directory))
        directory = pipe.recv()


class Opener:
    """Opens checkpoints in another process, and starts a new one if it hangs or ends."""

    def __init__(self, sound: Path) -> None:
        self.sound = sound
        self.start()

    def start(self) -> None:
        """Start a process, and wait until it has opened the sound checkpoint."""
        context = multiprocessing.get_context("spawn")  # a fork would copy the threads of torch
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.sound, theirs), daemon=True)
        self.process.start()
        theirs.close()
        if (outcome := self.pipe.recv()) != "loaded":
            raise SystemExit(f"the sound checkpoint {self.sound.name} is not loaded: {outcome}")

    def end(self) -> None:
        """Let the process end."""
        self.pipe.send(None)
        self.process.join()

    def open(self, directory: Path) -> str:
        """Return what came of opening a checkpoint, within the time that it may take."""
        self.pipe.send(directory)
        try:
            if self.pipe.poll(LIMIT_SECONDS):
                outcome: str = self.pipe.recv()
                return outcome
            outcome = "too slow"
        except (EOFError, OSError):
            self.process.join()
            outcome = f"the process ended with {self.process.exitcode}"
        self.process.kill()
        self.start()
        return outcome


def run(mode: str, rounds: int, seed: int, sound: Path, work: Path) -> Counter[str]:
    """Return the count of each outcome."""
    found: Counter[str] = Counter()
    opener = Opener(sound)
    for i in range(rounds):
        copy = work / f"{mode}-{i}"  # what is still open cannot be written anew on some systems
        shutil.copytree(sound, copy)
        file = damage(copy, random.Random(f"{mode}-{seed}-{i}"))
        outcome = opener.open(copy)
        shutil.rmtree(copy, ignore_errors=True)
        if outcome not in ("loaded", "refused"):
            print(f"  defect: {mode}, seed {seed}, round {i}, {file}: {outcome[:200]}", flush=True)
            outcome = "defect"
        found[outcome] += 1
    opener.end()
    return found


def main() -> int:
    """Print a line for each format; return 1 if there is a defect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    args, total = parser.parse_args(), Counter[str]()
    logging.disable(logging.CRITICAL)
    print("format".ljust(20) + "".join(f"{k:>9}" for k in OUTCOMES))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for mode in args.formats:
            sound = Path(place) / mode
            write_checkpoint(mode, sound)
            found = run(mode, args.rounds, args.seed, sound, Path(place) / "work")
            print(mode.ljust(20) + "".join(f"{found[k]:>9}" for k in OUTCOMES), flush=True)
            total += found
    return 1 if total["defect"] else 0


if __name__ == "__main__":
    sys.exit(main())
