"""Speed, memory and load time of quantized models, beside float models and other software.

The model is a Llama with random weights. ``decode`` is one token after 128, ``prefill`` reads 128
tokens and predicts the next, as before an answer is generated; ONNX Runtime predicts all. In each
process the work alternates with that of the float models, and figures are medians: tokens per CPU
second, with ``--device cuda`` per second of the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import alternate, cpu_seconds, in_fresh_process, machine, markdown, say

TOKENS = 128
GROUP = 128
VOCABULARY = 32000
SHAPES: dict[str, dict[str, int]] = {
    "full": {  # 0.62 billion parameters
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 20,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
    },
    "quick": {  # 82 million parameters
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
SCHEMES = ("int4_wo_128", "w_int8_per_tensor_sym", "int3_wo_128", "fp8", "mxfp4", "nvfp4")
RUNTIMES = ("exact", "fast", "compiled", "unpacked")
# Name of a row -> accuracy level of MatMulNBits: the type in which products are computed.
ONNX_LEVELS = {"int4, float32 products": 1, "int4, int8 products": 4}
# Software -> the worker that writes its model first, None if it quantizes itself.
PEERS = {"torchao": None, "onnxruntime": "onnx", "llama-cpp-python": "gguf"}
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Figures = dict[str, dict[str, float]]


def write_models(folder: str, size: str, schemes: list[str]) -> None:
    """Write the float model in bfloat16, and a quantized one for each scheme."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    torch.manual_seed(0)
    path = Path(folder)
    config = LlamaConfig(vocab_size=VOCABULARY, dtype="bfloat16", **SHAPES[size])
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(path / "float")
    ids = torch.randint(0, VOCABULARY, (1, 32))
    for name in schemes:
        model = AutoModelForCausalLM.from_pretrained(path / "float", dtype=torch.bfloat16).eval()
        quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=name))
        export_safetensors(quantizer.freeze(quantizer.quantize_model(model, [ids])), path / name)


def steps(model: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute one token after 128, and read 128 tokens."""
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    ids = ids.to(model.device)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values

    @torch.no_grad()
    def decode() -> None:
        for _ in range(3):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

    @torch.no_grad()
    def prefill() -> None:
        model(ids, use_cache=False, logits_to_keep=1)

    return decode, prefill


def device_seconds() -> float:
    """Return the time when the GPU has done its work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def time_models(models: dict[str, Any], rounds: int, device: str = "cpu") -> Figures:
    """Return tokens per second of each model, in alternation."""
    return time_steps({name: steps(model) for name, model in models.items()}, rounds, device)


def time_steps(work: dict[str, Any], rounds: int, device: str = "cpu") -> Figures:
    """Return the same of functions that ``steps`` returns."""
    clock = cpu_seconds if device == "cpu" else device_seconds
    decode = alternate({name: run for name, (run, _) in work.items()}, rounds, clock)
    prefill = alternate({name: run for name, (_, run) in work.items()}, max(2, rounds // 2), clock)
    return {name: {"decode": 3 / decode[name], "prefill": TOKENS / prefill[name]} for name in work}


def float_models(folder: str, device: str = "cpu") -> dict[str, Any]:
    """Return the float model in two types."""
    from transformers import AutoModelForCausalLM

    load, path = AutoModelForCausalLM.from_pretrained, f"{folder}/float"
    return {name: load(path, dtype=t).eval().to(device) for name, t in FLOATS.items()}


def weight_bytes(model: Any) -> int:
    """Return the bytes of the weights and what is kept beside them."""
    total = 0
    for module in model.modules():
        tensors = {**vars(module).get("_parameters", {}), **vars(module).get("_buffers", {})}
        product = getattr(module, "packed_product", None)
        if product is not None:
            total += product.nbytes
            tensors.pop("weight")
        kept = [*tensors.values(), *(getattr(module, "_values", None) or {}).values()]
        total += sum(getattr(t, "codes", t).nbytes for t in kept if t is not None)
    return total


def measure_scheme(folder: str, scheme: str, rounds: int, device: str = "cpu") -> Figures:
    """Measure the runtimes of a scheme beside the float models."""
    from quark.torch import set_runtime
    from quark.torch.export.recognition import load_checkpoint

    models, load_seconds = float_models(folder, device), {}
    for runtime in RUNTIMES:
        start = cpu_seconds()
        model = load_checkpoint(f"{folder}/{scheme}").eval().to(device)
        models[runtime] = set_runtime(model, runtime)
        load_seconds[runtime] = cpu_seconds() - start
    figures = time_models(models, rounds, device)
    for name, model in models.items():
        figures[name]["mb"] = weight_bytes(model) / 1e6
        if name in load_seconds:
            figures[name]["load"] = load_seconds[name]
    return figures


def measure_torchao(folder: str, rounds: int) -> Figures:
    """Measure the weight-only formats of torchao beside the float models, in its environment."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    models = float_models(folder)
    configs = {"int4": PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)}
    configs["int8"] = Int8WeightOnlyConfig()
    for name, config in configs.items():
        model = float_models(folder)["bfloat16"]
        quantize_(model.model, config)  # without the output head
        models[name] = model
    return time_models(models, rounds)


def write_onnx(folder: str) -> None:
    """Write the int4 model for ONNX Runtime: in float32, with MatMulNBits and a cache."""
    from quark.torch import ModelExporter
    from quark.torch.export.recognition import load_checkpoint

    model = load_checkpoint(f"{folder}/{SCHEMES[0]}").float().eval()
    ids = torch.randint(0, VOCABULARY, (2, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exporter = ModelExporter(f"{folder}/onnx")
    exporter.export_onnx_model(model, inputs, matmul_nbits=True, use_cache=True)


def measure_onnxruntime(folder: str, rounds: int) -> Figures:
    """Measure that model beside the float models, with products in float32 and in int8."""
    import onnx

    work = {name: steps(model) for name, model in float_models(folder).items()}
    graph = onnx.load(f"{folder}/onnx/quark_model.onnx", load_external_data=False)
    for name, level in ONNX_LEVELS.items():
        for node in graph.graph.node:
            if node.op_type == "MatMulNBits":
                del node.attribute[4:]  # after K, N, bits and block_size
                node.attribute.append(onnx.helper.make_attribute("accuracy_level", level))
        path = f"{folder}/onnx/level_{level}.onnx"
        onnx.save(graph, path)
        work[name] = onnx_steps(path)
    return time_steps(work, rounds)


def onnx_steps(path: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute one token after 128, and read 128 tokens, by ONNX Runtime."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (1, TOKENS))
    pasts = [i for i in session.get_inputs() if i.name.startswith("past")]
    nothing = {i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32) for i in pasts}
    prompt = {"input_ids": ids, "attention_mask": np.ones_like(ids), **nothing}
    _, *present = session.run(None, prompt)
    token = {"input_ids": ids[:, :1], "attention_mask": np.ones((1, TOKENS + 1), np.int64)}
    token |= dict(zip(nothing, present, strict=True))

    def decode() -> None:
        for _ in range(3):
            session.run(None, token)

    return decode, lambda: session.run(None, prompt)


def write_gguf(folder: str) -> None:
    """Write the int4 model as Q4_0, with the tokenizer of the shipped model."""
    from quark.cli.demo.material import shipped_model
    from quark.torch import ModelExporter
    from quark.torch.export.recognition import load_checkpoint

    model = load_checkpoint(f"{folder}/{SCHEMES[0]}").eval()
    ModelExporter(None, f"{folder}/gguf").export_gguf_model(model, shipped_model(), "model")


def measure_llama_cpp(folder: str, rounds: int) -> Figures:
    """Measure that model by llama.cpp beside the float models, in its environment."""
    work: dict[str, Any] = {name: steps(model) for name, model in float_models(folder).items()}
    work["int4, int8 products"] = llama_cpp_steps(f"{folder}/gguf/model.gguf")
    return time_steps(work, rounds)


def llama_cpp_steps(path: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute one token after 128, and read 128 tokens, by llama.cpp."""
    from llama_cpp import Llama

    batch = {"n_ctx": 2 * TOKENS, "n_batch": TOKENS, "n_ubatch": TOKENS}
    model = Llama(path, **batch, n_threads=1, n_threads_batch=1, verbose=False)
    ids = torch.randint(0, VOCABULARY, (TOKENS,)).tolist()

    def prefill() -> None:
        model.reset()
        model.eval(ids)

    def decode() -> None:
        for _ in range(3):
            model.n_tokens = TOKENS  # the next call takes back what came after
            model.eval(ids[:1])

    prefill()
    return decode, prefill


def rows_of(label: str, figures: Figures) -> list[list[object]]:
    """Return the rows of a table: a process with its float models."""
    best = {work: max(figures[n][work] for n in FLOATS) for work in ("decode", "prefill")}
    own = {"decode": figures["bfloat16"]["decode"], "prefill": figures["bfloat16"]["prefill"]}
    return [
        [
            label,
            name,
            row["decode"],
            row["decode"] / best["decode"],
            row["decode"] / own["decode"],
            row["prefill"],
            row["prefill"] / best["prefill"],
            row["prefill"] / own["prefill"],
            row.get("mb"),
            row.get("load"),
        ]
        for name, row in figures.items()
    ]


def main() -> None:
    """Print a table of all schemes, runtimes and peers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model of 82 million parameters")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU such as cuda")
    parser.add_argument("--peer", choices=PEERS, action="append", default=[])
    flags = parser.parse_args()
    schemes = flags.schemes.split(",")
    folder = tempfile.mkdtemp(prefix="inference-")
    rows: list[list[object]] = []
    try:
        say("writing models")
        size = "quick" if flags.quick else "full"
        in_fresh_process("inference.py", "write", folder, size, schemes)
        for scheme in schemes:
            say(scheme)
            measured = in_fresh_process(
                "inference.py",
                "scheme",
                folder,
                scheme,
                flags.rounds,
                flags.device,
                device=flags.device,
            )
            rows += rows_of(scheme, measured)
        for peer in flags.peer:
            from peers import environment

            say(peer)
            writer = PEERS[peer]
            if writer:
                if SCHEMES[0] not in schemes:
                    raise SystemExit(f"--peer {peer} runs {SCHEMES[0]}: add it to --schemes")
                in_fresh_process("inference.py", writer, folder)
            python = environment(peer)
            measured = in_fresh_process("inference.py", peer, folder, flags.rounds, python=python)
            rows += rows_of(peer, measured)
    finally:
        shutil.rmtree(folder)
    print(machine(), "\n")
    head = ["process", "model", "decode, tokens/s", ": best float", ": bfloat16"]
    head += ["prefill, tokens/s", ": best float", ": bfloat16", "weights, MB", "load, s"]
    print(markdown("Inference", head, rows))


WORKERS: dict[str, Callable[..., object]] = {
    "write": write_models,
    "scheme": measure_scheme,
    "torchao": measure_torchao,
    "onnx": write_onnx,
    "onnxruntime": measure_onnxruntime,
    "gguf": write_gguf,
    "llama-cpp-python": measure_llama_cpp,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("--"):
        torch.set_num_threads(1)
        worker, *arguments = map(json.loads, sys.argv[1:])
        print("\n" + json.dumps(WORKERS[worker](*arguments)))
    else:
        main()
