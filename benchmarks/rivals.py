"""The algorithms of other software: the same weights, formats and calibration data as for ours.

``python rivals.py '"name"' '"scheme"' '"algorithm"' '"folder"' iterations``, run by the environment
that ``peers.environment`` makes, quantizes the model that ``share`` put into the folder. What comes
of it is judged in the same process, beside the float model, so nothing depends on what a peer can
store. Options that are not set here are the peer's defaults.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Meter, cpu_seconds
from safetensors.torch import load_file, save_file
from scores import divergence

WINDOWS = "windows.safetensors"
W8A8 = "w_int8_per_channel_a_int8_per_tensor_sym"
GROUP = 128
# Schemes of weights in groups -> bits, symmetric.
WEIGHTS = {
    "int4_wo_128": (4, True),
    "uint4_wo_128": (4, False),
    "int3_wo_128": (3, True),
    "w_int2_per_group_asym": (2, False),
}


@dataclass
class Task:
    """What a peer is asked to do."""

    scheme: str
    algorithm: str
    folder: Path
    iterations: int  # of learned rounding
    calibration: torch.Tensor  # (windows, length)

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def samples(self) -> list[dict[str, list[int]]]:
        rows = self.calibration.tolist()
        return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]


Quantize = Callable[[], Any]  # returns the quantized model; everything is imported and loaded


def auto_round(task: Task) -> Quantize:
    from auto_round import AutoRound

    model, tokenizer = task.model(), task.tokenizer()
    how: dict[str, Any] = {"scheme": "MXFP4"}
    if task.scheme in WEIGHTS:
        bits, symmetric = WEIGHTS[task.scheme]
        how = {"scheme": "W4A16", "bits": bits, "sym": symmetric, "group_size": GROUP}
    windows, length = task.calibration.shape
    how |= {"nsamples": windows, "seqlen": length, "batch_size": 8, "device_map": "cpu"}
    if task.algorithm == "awq":
        how["alg_configs"] = "awq,rtn"
    else:
        how["iters"] = task.iterations
    rows = [{key: torch.tensor([row]) for key, row in each.items()} for each in task.samples()]
    return lambda: AutoRound(model, tokenizer=tokenizer, dataset=rows, **how).quantize()[0]


def llm_compressor(task: Task) -> Quantize:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model, inputs = task.model(), None
    if task.scheme in WEIGHTS:
        bits, symmetric = WEIGHTS[task.scheme]
        how = {"strategy": "group", "group_size": GROUP, "num_bits": bits, "symmetric": symmetric}
    else:
        how = {"strategy": "channel", "num_bits": 8}
        inputs = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False, observer="minmax")
    weights = QuantizationArgs(**how)
    layer = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    given = {"config_groups": {"all": layer}, "ignore": ["lm_head"]}
    recipes = {
        "gptq": lambda: [GPTQModifier(**given)],
        "smooth": lambda: [SmoothQuantModifier(), QuantizationModifier(**given)],
    }
    recipe, data = recipes[task.algorithm](), Dataset.from_list(task.samples())
    windows, length = task.calibration.shape
    counts = {"num_calibration_samples": windows, "max_seq_length": length, "batch_size": 8}
    return lambda: oneshot(model=model, recipe=recipe, dataset=data, **counts)


def amd_quark(task: Task) -> Quantize:
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config import config as c
    from quark.torch.quantization.config.algo_configs import get_algo_config

    specs = {
        "int4_wo_128": c.Int4PerGroupSpec,
        "uint4_wo_128": c.Uint4PerGroupSpec,
        "int3_wo_128": c.Int3PerGroupSpec,
        "w_int2_per_group_asym": c.Int2PerGroupSpec,
    }
    if task.scheme in specs:
        symmetric = WEIGHTS[task.scheme][1]
        weight = specs[task.scheme](ch_axis=-1, group_size=GROUP, symmetric=symmetric)
        layer = c.QLayerConfig(weight=weight.to_quantization_spec())
    else:
        made = {
            W8A8: (
                c.Int8PerChannelSpec(ch_axis=0, symmetric=True, is_dynamic=False),
                c.Int8PerTensorSpec(observer_method="min_max", symmetric=True, is_dynamic=False),
            ),
            "mxfp4": tuple(c.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=d) for d in (False, True)),
        }
        weight, inputs = (spec.to_quantization_spec() for spec in made[task.scheme])
        layer = c.QLayerConfig(weight=weight, input_tensors=inputs)
    name, *rotations = task.algorithm.split()
    algorithm = copy.deepcopy(get_algo_config(name, "llama")) if name != "none" else None
    for rotation in rotations:
        setattr(algorithm, rotation.lower(), True)
    config = c.QConfig(
        global_quant_config=layer, exclude=["lm_head"], algo_config=algorithm and [algorithm]
    )
    model, quantizer = task.model(), ModelQuantizer(config)
    data = torch.utils.data.DataLoader(task.calibration, batch_size=8)
    return lambda: quantizer.freeze(quantizer.quantize_model(model, data))


def gptqmodel(task: Task) -> Quantize:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    bits, symmetric = WEIGHTS[task.scheme]
    config = QuantizeConfig(
        bits=bits, sym=symmetric, group_size=GROUP, device="cpu", offload_to_disk=False
    )
    model = GPTQModel.load(str(task.folder), config, dtype=torch.float32)
    out = task.folder / f"gptqmodel-{task.scheme}"

    def quantize() -> Any:
        model.quantize(task.samples(), batch_size=8)
        model.save(str(out))
        kernel = BACKEND.GPTQ_TORCH
        return GPTQModel.load(str(out), device="cpu", backend=kernel, dtype=torch.float32).model

    return quantize


_GPTQ_AWQ = {scheme: ["gptq", "awq"] for scheme in ("int4_wo_128", "uint4_wo_128", "int3_wo_128")}
# Peer -> how it is asked, and which algorithms for which schemes.
PEERS: dict[str, tuple[Callable[[Task], Quantize], dict[str, list[str]]]] = {
    "auto-round": (auto_round, {s: ["autoround"] for s in [*WEIGHTS, "mxfp4"]}),
    "llm-compressor": (llm_compressor, {**{s: ["gptq"] for s in WEIGHTS}, W8A8: ["smooth"]}),
    "amd-quark": (
        amd_quark,
        {
            **{s: ["gptq"] for s in WEIGHTS},
            W8A8: ["none", "smooth"],
            "mxfp4": ["none", "rotation R1 R2"],
        },
    ),
    "gptqmodel": (gptqmodel, {s: ["gptq"] for s in WEIGHTS}),
}


def share(folder: Path, model: Any, tokenizer: Any, **windows: torch.Tensor) -> None:
    """Write what peers are given: the model, in float32, and windows of tokens by their name."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(windows, folder / WINDOWS)


def judge(peer: str, scheme: str, algorithm: str, folder: str, iterations: int) -> dict[str, Any]:
    """Let a peer quantize the shared model and return the figures of a row."""
    windows = load_file(Path(folder) / WINDOWS)
    task = Task(scheme, algorithm, Path(folder), iterations, windows["calibration"])
    quantize, original = PEERS[peer][0](task), task.model()
    with torch.inference_mode():
        start = cpu_seconds()
        for batch in task.calibration.split(8):
            original(batch)
        once = cpu_seconds() - start
    with Meter() as meter:
        model = quantize()
    with torch.inference_mode():
        losses = [float(model(w, labels=w).loss) for w in windows["evaluation"].split(1)]
    return {
        "perplexity": math.exp(sum(losses) / len(losses)),
        "kl": 1000 * divergence(original, model, windows["evaluation"]),
        "passes": meter.cpu / once,
        "added": meter.added,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n" + json.dumps(judge(*map(json.loads, sys.argv[1:]))))
