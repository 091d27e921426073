"""Checkpoints of the shipped model as other software writes them. Run without this package.

    python foreign_writers.py WRITER SOURCE FOLDER

SOURCE is a directory of Transformers, for llama.cpp a GGUF file. Prints a line of JSON: a list of
[kind, path] of what was written to FOLDER.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Written = list[tuple[str, Path]]
# Kinds of mlx_lm.convert: bits, inputs of a group.
MLX_KINDS = ((2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 32), (6, 64), (8, 32))
GGUF_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
# Schemes of compressed-tensors.
LLM_COMPRESSOR_KINDS = ("W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "W8A8")


def mlx(source: Path, folder: Path) -> Written:
    """Write by ``mlx_lm.convert``, scales in float32."""
    import mlx.core as mx
    from mlx_lm import convert

    mx.set_default_device(mx.cpu)
    written = []
    for bits, group in MLX_KINDS:
        path = folder / f"{bits}-{group}"
        given = {"q_bits": bits, "q_group_size": group, "dtype": "float32"}
        convert(str(source), mlx_path=str(path), quantize=True, **given)
        written.append((f"{bits} bits, groups of {group}", path))
    return written


def llama_cpp(source: Path, folder: Path) -> Written:
    """Write by the quantization of llama.cpp, without an importance matrix."""
    import llama_cpp as library

    written = []
    for kind in GGUF_KINDS:
        path = folder / f"{kind}.gguf"
        params = library.llama_model_quantize_default_params()
        params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        done = library.llama_model_quantize(
            str(source).encode(), str(path).encode(), ctypes.byref(params)
        )
        if done != 0:
            raise SystemExit(f"llama.cpp does not write {kind}")
        written.append((kind, path))
    return written


def torchao(source: Path, folder: Path) -> Written:
    """Write by Transformers with torchao."""
    import torch
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
    )
    from transformers import TorchAoConfig

    offsets = MappingType.ASYMMETRIC
    kinds = {
        "int8": Int8WeightOnlyConfig(),
        "int8, groups of 32": Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int8, int8 inputs": Int8DynamicActivationInt8WeightConfig(),
        "int4, groups of 32": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "int4 with offsets, groups of 64": IntxWeightOnlyConfig(torch.int4, PerGroup(64), offsets),
        "int3 with offsets, groups of 32": IntxWeightOnlyConfig(torch.int3, PerGroup(32), offsets),
        "int4, int8 inputs": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
        "fp8": Float8WeightOnlyConfig(),
    }
    written = []
    for kind, config in kinds.items():
        path = folder / kind.replace(" ", "-")
        load_float(source, quantization_config=TorchAoConfig(config)).save_pretrained(path)
        written.append((kind, path))
    return written


def llm_compressor(source: Path, folder: Path) -> Written:
    """Write by ``oneshot`` of llm-compressor, schemes of compressed-tensors without data."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    written = []
    for kind in LLM_COMPRESSOR_KINDS:
        model, path = load_float(source), folder / kind
        recipe = QuantizationModifier(targets="Linear", scheme=kind, ignore=["lm_head"])
        oneshot(model=model, recipe=recipe)
        model.save_pretrained(path, save_compressed=True)
        written.append((kind, path))
    return written


def load_float(source: Path, **options: Any) -> Any:
    """Return the float model of a directory, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)


WRITERS: dict[str, Callable[[Path, Path], Written]] = {
    "llama.cpp": llama_cpp,
    "llm-compressor": llm_compressor,
    "mlx": mlx,
    "torchao": torchao,
}


def main() -> None:
    writer, source, folder = sys.argv[1:]
    answer = os.dup(1)  # the libraries print to the standard output
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        written = WRITERS[writer](Path(source), Path(folder))
    with os.fdopen(answer, "w") as file:
        print(json.dumps([(kind, str(path)) for kind, path in written]), file=file)


if __name__ == "__main__":
    main()
