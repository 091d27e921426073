"""Checkpoints of the shipped model as other software writes them. Run without this package.

    python foreign_writers.py WRITER SOURCE FOLDER

SOURCE is a directory of Transformers, for llama.cpp a GGUF file. ``calibration.json`` in FOLDER has
sequences of token ids. Prints a line of JSON: a list of [kind, path] of what was written to FOLDER.
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

import interop_autogptq
from interop_workers import modelopt_model

Written = list[tuple[str, Path]]
# Kinds of mlx_lm.convert: bits, inputs of a group.
MLX_KINDS = ((2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 32), (6, 64), (8, 32))
GGUF_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
# Schemes of compressed-tensors.
LLM_COMPRESSOR_KINDS = ("W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "W8A8")
# Schemes of amd-quark for all layers but the head.
AMD_KINDS = (
    *("fp8", "ptpc_fp8", "int8", "ptpc_int8", "int4_wo_32", "int4_wo_128", "int4_wo_per_channel"),
    *("uint4_wo_32", "uint4_wo_128", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_mxfp6_e2m3"),
    *("mxfp4_fp8", "amdfp4", "int8 + fp8 cache"),
)
# Options of the configuration of gptqmodel.
GPTQ_KINDS: dict[str, dict[str, Any]] = {
    "4 bits, groups of 32": {"bits": 4, "group_size": 32},
    "4 bits, groups of 128, columns by activation": {
        **{"bits": 4, "group_size": 128},
        **{"desc_act": True, "act_group_aware": False},
    },
    "4 bits with offsets, groups of 64": {"bits": 4, "group_size": 64, "sym": False},
    "3 bits, groups of 32": {"bits": 3, "group_size": 32},
    "2 bits, groups of 32": {"bits": 2, "group_size": 32},
    "8 bits, groups of 128": {"bits": 8, "group_size": 128},
}
AWQ_GROUPS = (32, 128)
# Names of configurations of ModelOpt. It computes others on GPUs alone.
MODELOPT_KINDS = ("FP8_DEFAULT", "W4A16_NVFP4")


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


def amd_quark(source: Path, folder: Path) -> Written:
    """Write by amd-quark, with its named schemes."""
    import torch

    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    batches = [torch.tensor([ids]) for ids in calibration(folder)]
    written = []
    for kind in AMD_KINDS:
        scheme, cache, _ = kind.partition(" + fp8 cache")
        options = {"kv_cache_scheme": "fp8"} if cache else {}
        template: Any = LLMTemplate.get("llama")
        quantizer: Any = ModelQuantizer(
            template.get_config(scheme=scheme, exclude_layers=["lm_head"], **options)
        )
        model, path = quantizer.quantize_model(load_float(source), batches), folder / kind
        export_safetensors(quantizer.freeze(model), path)
        written.append((kind, path))
    return written


def early_amd_quark(source: Path, folder: Path) -> Written:
    """Write by AMD Quark 0.9 or 0.10."""
    from early_amd_quark import write

    return write(source, folder, calibration(folder))


def gptqmodel(source: Path, folder: Path) -> Written:
    """Write by gptqmodel."""
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    sequences = [{"input_ids": x, "attention_mask": [1] * len(x)} for x in calibration(folder)]
    written = []
    for kind, options in GPTQ_KINDS.items():
        config = QuantizeConfig(device="cpu", offload_to_disk=False, **options)
        model = GPTQModel.load(str(source), config, dtype=torch.float32)
        model.quantize(sequences, batch_size=8)
        model.save(str(folder / kind))
        written.append((kind, folder / kind))
    return written


def autoawq(source: Path, folder: Path) -> Written:
    """Write by AutoAWQ, with the order of codes that it calls GEMM."""
    import torch
    from awq import AutoAWQForCausalLM

    sequences = calibration(folder)
    written = []
    for group in AWQ_GROUPS:
        model = AutoAWQForCausalLM.from_pretrained(
            str(source), torch_dtype=torch.float32, device_map="cpu"
        )
        form = {"zero_point": True, "q_group_size": group, "w_bit": 4, "version": "GEMM"}
        model.quantize(None, form, calib_data=sequences, max_calib_seq_len=len(sequences[0]))
        path = folder / f"{group}"
        model.save_quantized(str(path))
        written.append((f"4 bits with offsets, groups of {group}", path))
    return written


def autogptq(source: Path, folder: Path) -> Written:
    """Write by AutoGPTQ."""
    return interop_autogptq.write(source, folder, calibration(folder))


def modelopt(source: Path, folder: Path) -> Written:
    """Write by ModelOpt for serving, and beside that what it computes itself.

    That is the model with its quantizers. Those of NVFP4 need a GPU: then it is the float model
    with the weights that its class of tensors gives for the codes in the files.
    """
    import copy

    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    mto.enable_huggingface_checkpointing()
    batches = [torch.tensor([ids]) for ids in calibration(folder)]
    written = []
    for kind in MODELOPT_KINDS:
        model, path = load_float(source), folder / kind
        config = copy.deepcopy(getattr(mtq, f"{kind}_CFG"))
        model = mtq.quantize(model, config, lambda model: [model(ids) for ids in batches])
        if "NVFP4" not in kind:
            model.save_pretrained(path / "own")
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=path)
        if "NVFP4" in kind:
            modelopt_model(path).save_pretrained(path / "own")
        written.append((kind, path))
    return written


def calibration(folder: Path) -> list[list[int]]:
    """Return the sequences of token ids for calibration."""
    sequences: list[list[int]] = json.loads((folder / "calibration.json").read_text())
    return sequences


def load_float(source: Path, **options: Any) -> Any:
    """Return the float model of a directory, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)


WRITERS: dict[str, Callable[[Path, Path], Written]] = {
    "amd-quark": amd_quark,
    "amd-quark-0.9": early_amd_quark,
    "amd-quark-0.10": early_amd_quark,
    "autoawq": autoawq,
    "autogptq": autogptq,
    "gptqmodel": gptqmodel,
    "llama.cpp": llama_cpp,
    "llm-compressor": llm_compressor,
    "mlx": mlx,
    "modelopt": modelopt,
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
