"""The algorithms of other software: the same weights, formats and calibration data as for ours.

``python rivals.py '"peer"' '"scheme"' '"label"' '"folder"'``, run by the environment of the peer,
quantizes the model that ``share`` put into the folder. What comes of it is judged in the same
process, beside the float model, whatever the peer can store. Options that are not set here are the
peer's defaults.
"""

from __future__ import annotations

import copy
import ctypes
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import Meter, cpu_seconds
from safetensors.torch import load_file, save_file
from scores import judge_text, predict

WINDOWS = "windows.safetensors"
W8A8 = "w_int8_per_channel_a_int8_per_tensor_sym"
# Schemes of weights in groups -> bits, symmetric, size of a group, amd-quark's name of the type.
WEIGHTS = {
    "int4_wo_128": (4, True, 128, "Int4PerGroupSpec"),
    "int4_wo_64": (4, True, 64, "Int4PerGroupSpec"),
    "uint4_wo_128": (4, False, 128, "Uint4PerGroupSpec"),
    "int3_wo_128": (3, True, 128, "Int3PerGroupSpec"),
    "int3_wo_64": (3, True, 64, "Int3PerGroupSpec"),
    "w_int2_per_group_asym": (2, False, 128, "Int2PerGroupSpec"),
}
# Schemes of blocks of fp4, whose inputs are rounded too -> the name of auto-round, llm-compressor.
BLOCKS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}
# Schemes of 8 bits for weights and inputs -> the name of auto-round, and of llm-compressor.
EIGHT = {"fp8": "FP8_STATIC", "ptpc_int8": "INT8_W8A8"}
PRESETS = {"fp8": "FP8", "ptpc_fp8": "FP8_DYNAMIC", "ptpc_int8": "INT8"}
INT8 = "int8_wo"  # weights per channel
# Schemes of such blocks for weights alone -> the same.
WEIGHT_BLOCKS = {"mxfp4_weight_only": ("MXFP4", "MXFP4A16")}
# Schemes of super-blocks -> the type in llama.cpp, and the one it takes for other inputs.
SUPER_BLOCKS = {
    "q2_k": ("Q2_K", "IQ4_NL"),
    "q3_k": ("Q3_K", "IQ4_NL"),
    "q4_k": ("Q4_K", "Q5_0"),
    "q5_k": ("Q5_K", "Q5_1"),
    "q6_k": ("Q6_K", "Q8_0"),
}

# Name of an algorithm -> ModelOpt's name of its configuration. Its blocks of fp4 need CUDA.
MODELOPT = {
    "awq": "INT4_AWQ_CFG",
    "smoothquant": "INT8_SMOOTHQUANT_CFG",
    "maximum": "FP8_DEFAULT_CFG",
    "maximum of rows": "INT8_WEIGHT_ONLY_CFG",
}


@dataclass
class Task:
    """The task of a peer."""

    scheme: str
    algorithms: list[dict[str, Any]]
    folder: Path
    calibration: torch.Tensor  # (windows, length)

    def model(self) -> Any:
        """Load the model that is shared."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def tokenizer(self) -> Any:
        """Load its tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def group_size(self, wanted: int) -> int:
        """Return a size of groups, halved until it divides the inputs of all layers."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.folder)
        inner = getattr(config, "intermediate_size", 4 * config.hidden_size)  # as GPT-2 has
        return math.gcd(config.hidden_size, inner, wanted)

    def samples(self) -> list[dict[str, list[int]]]:
        """Return the windows of calibration data as lists."""
        rows = self.calibration.tolist()
        return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]


# What is measured, once all is imported and loaded; it returns the quantized model, unless that is
# what comes next.
Steps = Iterator[Any]


def auto_round(task: Task) -> Steps:
    from auto_round import AutoRound

    model, tokenizer = task.model(), task.tokenizer()
    if task.scheme in WEIGHTS:
        bits, symmetric, group, _ = WEIGHTS[task.scheme]
        how = {"scheme": "W4A16", "bits": bits, "sym": symmetric}
        how["group_size"] = task.group_size(group)
    elif task.scheme == INT8:
        how = {"scheme": "W8A16", "bits": 8, "sym": True, "group_size": -1}
    elif task.scheme in WEIGHT_BLOCKS:
        how = {"scheme": WEIGHT_BLOCKS[task.scheme][0], "act_bits": 16}
    else:
        how = {"scheme": (BLOCKS | EIGHT)[task.scheme]}
    [algorithm] = task.algorithms
    if algorithm["name"] == "awq":
        how["alg_configs"] = "awq,rtn"
    else:
        how |= {key: value for key, value in algorithm.items() if key != "name"}
    windows, length = task.calibration.shape
    batch = min(8, max(1, windows // 3))  # a step takes a part of the windows, however few
    how |= {"nsamples": windows, "seqlen": length, "batch_size": batch, "device_map": "cpu"}
    rows = [{key: torch.tensor([row]) for key, row in each.items()} for each in task.samples()]
    yield lambda: AutoRound(model, tokenizer=tokenizer, dataset=rows, **how).quantize()[0]


def llm_compressor(task: Task) -> Steps:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model, given = task.model(), {"ignore": ["lm_head"]}
    if task.scheme in BLOCKS:
        given |= {"targets": ["Linear"], "scheme": BLOCKS[task.scheme]}
    elif task.scheme in WEIGHT_BLOCKS:
        given |= {"targets": ["Linear"], "scheme": WEIGHT_BLOCKS[task.scheme][1]}
    elif task.scheme in PRESETS:
        given |= {"targets": ["Linear"], "scheme": PRESETS[task.scheme]}
    else:
        how, inputs = {"strategy": "channel", "num_bits": 8}, None
        if task.scheme in WEIGHTS:
            bits, symmetric, group, _ = WEIGHTS[task.scheme]
            how = {"strategy": "group", "group_size": task.group_size(group)}
            how |= {"num_bits": bits, "symmetric": symmetric}
        elif task.scheme != INT8:
            whole = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": "minmax"}
            inputs = QuantizationArgs(**whole)
        weights = QuantizationArgs(**how)
        layer = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        given["config_groups"] = {"all": layer}
    smooths = [options for options in task.algorithms if options["name"] == "smoothquant"]
    recipe = [SmoothQuantModifier(smoothing_strength=options["alpha"]) for options in smooths]
    rounding = QuantizationModifier if smooths == task.algorithms else GPTQModifier
    recipe.append(rounding(**given))
    data = Dataset.from_list(task.samples())
    windows, length = task.calibration.shape
    counts = {"num_calibration_samples": windows, "max_seq_length": length, "batch_size": 8}
    yield lambda: oneshot(model=model, recipe=recipe, dataset=data, **counts)


def amd_quark(task: Task) -> Steps:
    from quark.torch.quantization.config.algo_configs import get_algo_config

    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config import config as c

    if task.scheme in WEIGHTS:
        _, symmetric, group, name = WEIGHTS[task.scheme]
        given = {"ch_axis": -1, "group_size": task.group_size(group), "symmetric": symmetric}
        specs = [getattr(c, name)(**given)]
    elif task.scheme == W8A8:
        inputs = c.Int8PerTensorSpec(observer_method="min_max", symmetric=True, is_dynamic=False)
        specs = [c.Int8PerChannelSpec(ch_axis=0, symmetric=True, is_dynamic=False), inputs]
    else:
        specs = [c.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=dynamic) for dynamic in (False, True)]
    tensors = zip(("weight", "input_tensors"), specs, strict=False)
    layer = c.QLayerConfig(**{key: spec.to_quantization_spec() for key, spec in tensors})
    algorithms = []
    for options in map(dict, task.algorithms):
        algorithms.append(copy.deepcopy(get_algo_config(options.pop("name"), "llama")))
        for key, value in options.items():
            setattr(algorithms[-1], key, value)
    how = c.QConfig(global_quant_config=layer, exclude=["lm_head"], algo_config=algorithms or None)
    model, quantizer = task.model(), ModelQuantizer(how)
    data = torch.utils.data.DataLoader(task.calibration, batch_size=8)
    yield lambda: quantizer.freeze(quantizer.quantize_model(model, data))


def gptqmodel(task: Task) -> Steps:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it does not start with fewer
    os.chdir(task.folder)  # where it writes a log
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    bits, symmetric, group, _ = WEIGHTS[task.scheme]
    config = QuantizeConfig(
        bits=bits,
        sym=symmetric,
        group_size=task.group_size(group),
        device="cpu",
        offload_to_disk=False,
    )
    model, values = GPTQModel.load(str(task.folder), config, dtype=torch.float32), task.model()
    out = str(task.folder / "gptqmodel")

    yield lambda: model.quantize(task.samples(), batch_size=8)
    model.save(out)
    stored = GPTQModel.load(out, device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    for name, layer in stored.model.named_modules():
        if hasattr(layer, "dequantize_weight"):  # it has no product in float32
            values.get_submodule(name).weight.data.copy_(layer.dequantize_weight().T)
    yield values


def modelopt(task: Task) -> Steps:
    import modelopt.torch.quantization as mtq

    [algorithm] = task.algorithms
    how, model = copy.deepcopy(getattr(mtq, MODELOPT[algorithm["name"]])), task.model()
    for entry in how["quant_cfg"]:
        sizes = entry.get("cfg", {}).get("block_sizes", {})
        if task.scheme in WEIGHTS and sizes:
            sizes[-1] = task.group_size(WEIGHTS[task.scheme][2])

    def run(module: Any) -> None:
        for batch in task.calibration.split(8):
            module(batch)

    yield lambda: mtq.quantize(model, how, run)


def llama_cpp(task: Task) -> Steps:
    """Round by ggml, with the mean squares of the inputs as its importance matrix."""
    import gguf
    import xllamacpp
    from gguf import GGMLQuantizationType as Kind

    [library] = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    ggml, model = ctypes.CDLL(str(library)), task.model()
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    layers = {name: m for name, m in model.model.named_modules() if isinstance(m, torch.nn.Linear)}

    def quantize() -> None:
        squares = mean_squares(model, layers, task.calibration) if task.algorithms else {}
        for name, layer in layers.items():
            values, columns = layer.weight.detach().contiguous(), layer.in_features
            kind = SUPER_BLOCKS[task.scheme][0 if columns % 256 == 0 else 1]
            of_block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
            codes = torch.empty(len(values), columns // of_block * size, dtype=torch.uint8)
            weights = squares[name].data_ptr() if squares else None
            pointers = (ctypes.c_void_p(p) for p in (values.data_ptr(), codes.data_ptr(), weights))
            source, target, importance = pointers
            counts = (ctypes.c_int64(n) for n in (0, len(values), columns))
            ggml.ggml_quantize_chunk(Kind[kind].value, source, target, *counts, importance)
            rounded = gguf.quants.dequantize(codes.numpy(), Kind[kind])
            layer.weight.data.copy_(torch.from_numpy(rounded))

    yield quantize
    yield model


@torch.inference_mode()
def mean_squares(
    model: Any, layers: dict[str, Any], windows: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the mean squares of the inputs of layers, by name, (columns,) float32."""
    sums = {name: torch.zeros(layer.in_features) for name, layer in layers.items()}

    def add(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            sums[name] += inputs[0].flatten(0, -2).square().sum(0)

        return hook

    hooks = [layer.register_forward_pre_hook(add(name)) for name, layer in layers.items()]
    for batch in windows.split(8):
        model(batch)
    for hook in hooks:
        hook.remove()
    return {name: total / windows.numel() for name, total in sums.items()}


Algorithms = dict[str, list[dict[str, Any]]]  # as in algorithms.py: name for the table -> options


def _named(*names: str) -> Algorithms:
    """Return algorithms without options."""
    return {name: [{"name": name}] for name in names}


_GPTQ: Algorithms = {"gptq": [{"name": "gptq"}]}
_AWQ: Algorithms = {"awq": [{"name": "awq"}]}
_IMPORTANCE: Algorithms = {"": [], "importance": [{"name": "importance matrix"}]}
_QRONOS: Algorithms = {"qronos": [{"name": "qronos"}]}
_AUTOROUND: Algorithms = {
    "autoround": [{"name": "autoround"}],
    "autoround, 50 steps": [{"name": "autoround", "iters": 50}],
    "autoround, 200 steps": [{"name": "autoround", "iters": 200}],
    "signround v2, 50 steps": [{"name": "autoround", "iters": 50, "enable_alg_ext": True}],
}
_ROTATION: Algorithms = {"rotation R1 R2": [{"name": "rotation", "r1": True, "r2": True}]}
_SMOOTH: Algorithms = {
    f"smooth, alpha {alpha}": [{"name": "smoothquant", "alpha": alpha}] for alpha in (0.8, 1)
}
_SMOOTH_GPTQ: Algorithms = {"smooth, gptq": [*_SMOOTH["smooth, alpha 0.8"], *_GPTQ["gptq"]]}
_INT4 = ("int4_wo_128", "int4_wo_64", "uint4_wo_128")
_GROUPED = [*WEIGHTS, *BLOCKS, *WEIGHT_BLOCKS]
# Peer -> what asks it, and what it is asked for: algorithms by scheme and name for the table.
PEERS: dict[str, tuple[Callable[[Task], Steps], dict[str, Algorithms]]] = {
    "auto-round": (
        auto_round,
        {s: (_AWQ if s in _INT4 else {}) | _AUTOROUND for s in (*_GROUPED, *EIGHT, INT8)},
    ),
    "llm-compressor": (
        llm_compressor,
        {
            **dict.fromkeys(_GROUPED, _GPTQ),
            **dict.fromkeys((*PRESETS, INT8), {"": []} | _GPTQ),
            **dict.fromkeys((W8A8, "ptpc_int8"), {"": []} | _GPTQ | _SMOOTH | _SMOOTH_GPTQ),
        },
    ),
    "amd-quark": (
        amd_quark,
        {
            **{s: (_AWQ if s in _INT4 else {}) | _GPTQ | _QRONOS for s in WEIGHTS},
            W8A8: {"": [], **_SMOOTH},
            "mxfp4": {"": [], **_ROTATION},
        },
    ),
    "gptqmodel": (gptqmodel, dict.fromkeys(WEIGHTS, _GPTQ)),
    "llama.cpp": (llama_cpp, dict.fromkeys(SUPER_BLOCKS, _IMPORTANCE)),
    "modelopt": (
        modelopt,
        {
            **dict.fromkeys(("int4_wo_128", "int4_wo_64"), _AWQ),
            W8A8: _named("smoothquant"),
            "fp8": _named("maximum"),
            INT8: _named("maximum of rows"),
        },
    ),
}


def share(folder: Path, model: Any, tokenizer: Any, **windows: torch.Tensor) -> None:
    """Write the input of peers: the model in float32, and windows of tokens by name."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(windows, folder / WINDOWS)


def judge(peer: str, scheme: str, label: str, folder: str) -> dict[str, Any]:
    """Run a peer on the shared model and return the figures of its row, by text."""
    windows = load_file(Path(folder) / WINDOWS)
    calibration = windows.pop("calibration")
    prepare, schemes = PEERS[peer]
    task = Task(scheme, schemes[scheme][label], Path(folder), calibration)
    steps, original = prepare(task), task.model()
    quantize = next(steps)
    with torch.inference_mode():
        start = cpu_seconds()
        for batch in task.calibration.split(8):
            original(batch)
        once = cpu_seconds() - start
    with Meter() as meter:
        result = quantize()
    model = next(steps, result)
    texts = {
        name: judge_text([predict(original, window) for window in text], model, text)
        for name, text in windows.items()
    }
    figures = {"seconds": meter.cpu, "passes": meter.cpu / once, "added": meter.added}
    return {"texts": texts, **figures}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n" + json.dumps(judge(*map(json.loads, sys.argv[1:]))))
