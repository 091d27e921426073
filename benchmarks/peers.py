"""Other software doing the same work: 4-bit weights in groups of 128, rounded to the nearest.

``environment`` makes a virtual environment for a peer; ``python peers.py '"name"' '"size"'``, run
by that environment, quantizes the random model and prints the CPU seconds and the added memory of
each stage. Stages that have the same name leave the model with the same things computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = {
    "llm-compressor": ("llmcompressor==0.14.0.1",),
    "amd-quark": ("amd-quark==0.13", "transformers==5.23.0", "accelerate==1.15.0"),
    "torchao": ("torchao==0.18.0", "transformers==5.23.0"),
    "auto-round": ("auto-round==0.16.1", "transformers==5.23.0"),
    "gptqmodel": ("gptqmodel==7.6.0", "transformers==5.23.0"),
    "llama.cpp": ("xllamacpp==2026.10.11549", "gguf==0.19.0", "transformers==5.23.0"),
    "llama-cpp-python": ("llama-cpp-python==0.3.36", "transformers==5.23.0"),  # a compiler's work
    "onnxruntime": (
        *("onnxruntime==1.31.1", "onnx==1.23.2", "safetensors"),
        "transformers==5.23.0",  # float models beside
    ),
    "torchao-graphs": ("torchao==0.18.0", "safetensors", "numpy"),
    "brevitas": ("brevitas==0.13.4", "safetensors", "numpy"),
    "modelopt": (
        *("nvidia-modelopt==0.47.0", "requests", "safetensors", "numpy"),
        *("transformers==5.23.0", "accelerate==1.15.0"),  # imported, though not required
    ),
    "amd-quark-graphs": (
        *("amd-quark==0.13", "torchao==0.18.0"),
        *("transformers==5.23.0", "accelerate==1.15.0"),
    ),
}
SCALES, VALUES, PACKED = "scales", "quantized values", "packed codes"
GROUP = 128

Stages = Iterator[tuple[str, Callable[[], object]]]


def environment(peer: str) -> Path:
    """Return the Python of a virtual environment with a peer in it, made on first use.

    It has the torch that ``constraints.txt`` names, and lies in ``build/peers``.
    """
    folder = ROOT / "build" / "peers" / peer
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "installed.txt"
    torch_line = _torch_requirement()
    wanted = "\n".join([*REQUIREMENTS[peer], torch_line])
    if not done.is_file() or done.read_text() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        constraints = folder / "constraints.txt"
        constraints.write_text(torch_line)
        pip = [python, "-m", "pip", "install", "--quiet", "-c", constraints]
        subprocess.run([*pip, "torch", *REQUIREMENTS[peer]], check=True, stdout=sys.stderr)
        done.write_text(wanted)
    return python


def _torch_requirement() -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def quark(model: Any) -> Stages:
    """Quantize by this package."""
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.export.checkpoint.writer import collect, make_format
    from quark.torch.quantization.config.export import JsonExporterConfig

    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=f"int4_wo_{GROUP}"))
    yield SCALES, lambda: quantizer.quantize_model(model)
    yield VALUES, lambda: quantizer.freeze(model)
    how = make_format(model, None, JsonExporterConfig(), "quark")
    yield PACKED, lambda: collect(model, how)


def llm_compressor(model: Any) -> Stages:
    """Quantize by llm-compressor, whose weights stay in float until they are packed."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    how = QuantizationArgs(num_bits=4, symmetric=True, strategy="group", group_size=GROUP)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=how)}
    recipe = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    with tempfile.TemporaryDirectory() as folder:  # it looks for the files of the model
        model.config.save_pretrained(folder)
        model.config._name_or_path = folder
        yield SCALES, lambda: oneshot(model=model, recipe=[recipe], tokenizer=_Nothing())
    yield PACKED, lambda: ModelCompressor.from_pretrained_model(model).compress_model(model)


class _Nothing:
    """Replaces a tokenizer where no text is read."""


def amd_quark(model: Any) -> Stages:
    """Quantize by amd-quark, which imports under the same name as this package."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Int4PerGroupSpec, QConfig, QLayerConfig

    how = Int4PerGroupSpec(
        ch_axis=-1, is_dynamic=False, scale_type="float", group_size=GROUP, symmetric=True
    )
    layer = QLayerConfig(weight=how.to_quantization_spec())
    quantizer = ModelQuantizer(QConfig(global_quant_config=layer, exclude=["lm_head"]))
    yield SCALES, lambda: quantizer.quantize_model(model)
    yield VALUES, lambda: quantizer.freeze(model)


def torchao(model: Any) -> Stages:
    """Quantize by torchao, whose weights become codes of a byte each, with their scales."""
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    how = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
    yield VALUES, lambda: quantize_(model.model, how)  # without the output head


PEERS = {
    "quark": quark,
    "llm-compressor": llm_compressor,
    "amd-quark": amd_quark,
    "torchao": torchao,
}


def measure_stages(peer: str, size: str) -> list[dict[str, Any]]:
    """Return for each stage the CPU seconds since the first began, and the peak added memory."""
    import random_llama
    from measure import Meter

    total, results = 0.0, []
    for stage, run in PEERS[peer](random_llama.build(size)):
        with Meter() as meter:
            kept = run()  # packed codes exist until the meter is read
        del kept
        total += meter.cpu
        results.append({"peer": peer, "stage": stage, "cpu_s": total, "added_mib": meter.added})
    return results


if __name__ == "__main__":
    print("\n" + json.dumps(measure_stages(*map(json.loads, sys.argv[1:]))))
