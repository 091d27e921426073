"""What clients compute from checkpoints. Run by the Python of a client, without this package.

    python interop_workers.py TASKS RESULTS

TASKS is a JSON file: a client, prompts of token ids, and for each checkpoint its path, whether it
has a cache of fp8, and a file to which vLLM writes what each linear layer took and gave. RESULTS
gets a line of JSON for each: the log-probability of every token of every prompt but the first, or
an error. Each checkpoint is opened in a process of its own, so that one that crashes takes no other
with it; where processes can be forked, the client is imported once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import interop_autogptq
import numpy as np

LogProbabilities = list[list[float]]


class Task(NamedTuple):
    """A checkpoint, and what it is asked for."""

    path: Path
    prompts: list[list[int]]
    cache: bool
    layers: Path


Compute = Callable[[Task], LogProbabilities]


def of_logits(logits: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first; logits are (tokens, vocabulary)."""
    ahead = np.asarray(logits, dtype=np.float64)[: len(ids) - 1]
    ahead = ahead - ahead.max(-1, keepdims=True)
    ahead = ahead - np.log(np.exp(ahead).sum(-1, keepdims=True))
    found: list[float] = ahead[np.arange(len(ids) - 1), ids[1:]].tolist()
    return found


def of_model(model: Any, prompts: list[list[int]]) -> LogProbabilities:
    """Return what a model of Transformers computes."""
    import torch

    with torch.no_grad():
        return [
            of_logits(model(torch.tensor([ids])).logits[0].float().numpy(), ids) for ids in prompts
        ]


def transformers() -> Compute:
    """Open checkpoints by Transformers, and whatever it needs for their format."""
    from transformers import AutoModelForCausalLM

    with contextlib.suppress(ImportError):
        import quark.torch  # noqa: F401  # ours or amd-quark's: once, not in each process

    def compute(task: Task) -> LogProbabilities:
        is_gguf = task.path.suffix == ".gguf"
        model, report = AutoModelForCausalLM.from_pretrained(
            task.path.parent if is_gguf else task.path,
            dtype="float32" if is_gguf else "auto",
            output_loading_info=True,
            **({"gguf_file": task.path.name} if is_gguf else {}),
        )
        wrong = {what: sorted(map(str, names))[:1] for what, names in report.items() if names}
        if wrong:
            raise ValueError(str(wrong))
        return of_model(model, task.prompts)

    return compute


def early_amd_quark() -> Compute:
    """Open checkpoints by the importer of AMD Quark 0.9 or 0.10: Transformers asks for 0.12."""
    from early_amd_quark import prepare, read

    prepare()
    return lambda task: of_model(read(task.path), task.prompts)


def modelopt() -> Compute:
    """Compute by the model that ModelOpt keeps beside its files, else by the values of its classes.

    ModelOpt does not open files for serving itself.
    """
    import modelopt.torch.opt as mto
    from transformers import AutoModelForCausalLM

    mto.enable_huggingface_checkpointing()

    def compute(task: Task) -> LogProbabilities:
        own = task.path / "own"
        if own.exists():
            model = AutoModelForCausalLM.from_pretrained(own, dtype="float32")
        else:
            model = modelopt_model(task.path)
        return of_model(model, task.prompts)

    return compute


def modelopt_model(path: Path) -> Any:
    """Return a float model with the weights that ModelOpt's classes of tensors give for files.

    Inputs of fp8 layers pass ModelOpt's quantizers, with the ranges in the files.
    """
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config, stored = AutoConfig.from_pretrained(path), load_file(path / "model.safetensors")
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = [key.removesuffix("_scale") for key in stored if key.endswith(".weight_scale")]
    assert names
    for name in names:
        shape = model.get_parameter(name).shape
        codes, scale = stored[name], stored.pop(f"{name}_scale")
        if f"{name}_scale_2" in stored:
            packed = NVFP4QTensor(shape, torch.float32, codes)
            given = {"double_scale": stored.pop(f"{name}_scale_2"), "block_sizes": {-1: 16}}
        else:
            packed, given = FP8QTensor(shape, torch.float32, codes), {}
        stored[name] = packed.dequantize(torch.float32, scale=scale, **given)
    ranges = {key: stored.pop(key) for key in [*stored] if key.endswith(".input_scale")}
    model.load_state_dict(stored, strict=not config.tie_word_embeddings)
    if ranges:
        inputs = [{"quantizer_name": "*", "enable": False}]
        inputs += [{"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3)}}]
        mtq.quantize(model, {"quant_cfg": inputs, "algorithm": None})
    for key, scale in ranges.items():
        layer = model.get_submodule(key.removesuffix(".input_scale"))
        layer.input_quantizer.amax = scale * 448
    for name, module in model.named_modules():
        if ranges and name.endswith("input_quantizer") and not hasattr(module, "_amax"):
            module.disable()
    return model


def autoawq() -> Compute:
    """Compute by float weights, as AutoAWQ dequantizes codes: its kernels for CPUs are gone."""
    import torch
    from awq.utils.packing_utils import dequantize_gemm
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    def compute(task: Task) -> LogProbabilities:
        config = AutoConfig.from_pretrained(task.path)
        form = config.quantization_config
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32).eval()
        stored = load_file(task.path / "model.safetensors")
        for name in [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]:
            codes, zeros, scales = (
                stored.pop(f"{name}.{x}") for x in ("qweight", "qzeros", "scales")
            )
            sizes = form["bits"], form["group_size"]
            stored[f"{name}.weight"] = dequantize_gemm(codes, zeros, scales.float(), *sizes).T
        model.load_state_dict(stored)
        return of_model(model, task.prompts)

    return compute


def lm_eval() -> Compute:
    """Ask lm-evaluation-harness for the likelihood of each token after those before it."""
    from lm_eval.models.huggingface import HFLM

    def compute(task: Task) -> LogProbabilities:
        model = HFLM(pretrained=str(task.path), dtype="float32", device="cpu", batch_size=8)
        found = []
        for ids in task.prompts:
            parts = [(("", ""), ids[:i], [ids[i]]) for i in range(1, len(ids))]
            answers = model._loglikelihood_tokens(parts, disable_tqdm=True)
            found.append([float(likelihood) for likelihood, _ in answers])
        return found

    return compute


def vllm() -> Compute:
    """Compute in float32, which vLLM offers for models in float alone, by kernels in torch."""
    import interop_kernels
    import torch
    from vllm.model_executor.layers import quantization

    interop_kernels.replace()
    types = [torch.float32]
    methods = ("quark", "awq", "gptq", "awq_marlin", "gptq_marlin", "compressed-tensors", "fp8")
    for method in (*methods, "modelopt", "modelopt_fp4", "modelopt_mxfp8"):
        config: Any = quantization.get_quantization_config(method)
        config.get_supported_act_dtypes = classmethod(lambda cls: types)
    return vllm_as_it_is("float32")


def listen(model: Any) -> dict[str, list[Any]]:
    """Return where linear layers of vLLM will put what they take and give, (tokens, features).

    Names are those of the checkpoint: what a layer gives is split into what it was joined from.
    """
    from vllm.model_executor.layers.linear import LinearBase

    heard: dict[str, list[Any]] = {}

    def record(name: str, layer: Any) -> None:
        parent, _, own = name.rpartition(".")
        parts = model.packed_modules_mapping.get(own, [own])

        def hook(_: Any, given: Any, result: Any) -> None:
            sizes = layer.output_sizes if len(parts) > 1 else [layer.output_size]
            for part, output in zip(parts, result[0].split(sizes, -1), strict=True):
                heard.setdefault(f"{parent}.{part}.input", []).append(given[0].clone())
                heard.setdefault(f"{parent}.{part}.output", []).append(output.clone())

        layer.register_forward_hook(hook)

    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            record(name, layer)
    return heard


def vllm_as_it_is(dtype: str = "bfloat16") -> Compute:
    """Compute by the kernels that vLLM has for this processor."""
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    def compute(task: Task) -> LogProbabilities:
        model = LLM(
            model=str(task.path),
            dtype=dtype,
            kv_cache_dtype="fp8" if task.cache else "auto",
            max_model_len=2 * len(task.prompts[0]),
            max_num_seqs=1,  # a range of a whole tensor is that of one prompt
            enforce_eager=True,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        [heard] = model.apply_model(listen)
        how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in task.prompts]
        found = []
        for answer in model.generate(prompts, how, use_tqdm=False):
            tokens = zip(answer.prompt_token_ids, answer.prompt_logprobs, strict=True)
            found.append([at[token].logprob for token, at in list(tokens)[1:]])
        save_file({name: torch.cat(parts) for name, parts in heard.items()}, task.layers)
        return found

    return compute


def llama_cpp() -> Compute:
    """Compute by llama.cpp, with a cache in float32."""
    from llama_cpp import Llama

    def compute(task: Task) -> LogProbabilities:
        length = len(task.prompts[0])
        model = Llama(
            str(task.path),
            n_ctx=length,
            n_batch=length,
            logits_all=True,
            type_k=0,
            type_v=0,
            flash_attn=False,
            verbose=False,
        )
        found = []
        for ids in task.prompts:
            model.reset()
            model.eval(ids)
            found.append(of_logits(model.scores[: len(ids)], ids))
        return found

    return compute


def mlx() -> Compute:
    """Compute by mlx-lm on the CPU."""
    import mlx.core as mx
    from mlx_lm import load

    mx.set_default_device(mx.cpu)

    def compute(task: Task) -> LogProbabilities:
        model, _ = load(str(task.path))
        return [
            of_logits(model(mx.array([ids]))[0].astype(mx.float32), ids) for ids in task.prompts
        ]

    return compute


def onnxruntime() -> Compute:
    """Compute by ONNX Runtime, with the settings that make it exact."""
    import onnxruntime as runtime

    def compute(task: Task) -> LogProbabilities:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        options.add_session_config_entry("session.x64quantprecision", "1")
        session = runtime.InferenceSession(
            str(task.path), options, providers=["CPUExecutionProvider"]
        )
        [name] = [given.name for given in session.get_inputs()]
        found = []
        for ids in task.prompts:
            [logits] = session.run(None, {name: np.array([ids])})
            found.append(of_logits(logits[0], ids))
        return found

    return compute


CLIENTS: dict[str, Callable[[], Compute]] = {
    "vllm": vllm,
    "vllm as it is": vllm_as_it_is,
    "llama.cpp": llama_cpp,
    "mlx": mlx,
    "transformers": transformers,
    "onnxruntime": onnxruntime,
    "autoawq": autoawq,
    "autogptq": lambda: interop_autogptq.compute,
    "modelopt": modelopt,
    "compressed-tensors": transformers,
    "gptqmodel": transformers,
    "llm-compressor": transformers,
    "torchao": transformers,
    "amd-quark": transformers,
    "amd-quark-0.9": early_amd_quark,
    "amd-quark-0.10": early_amd_quark,
    "lm-eval": lm_eval,
}


@functools.cache
def start(client: str) -> Compute:
    """Import a client, once in a process and those forked from it."""
    return CLIENTS[client]()


def answer(client: str, task: Task) -> dict[str, Any]:
    """Return {"found": …} or {"error": …}, also if the process crashes."""
    way = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(way)
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(theirs, client, task))
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        child.join()
        found = {"error": f"the process ended with {child.exitcode}"}
    child.join()
    return found


def _send(out: Connection, client: str, task: Task) -> None:
    out.send(_try(client, task))
    out.close()
    os._exit(0)  # some clients wait for threads otherwise


def _try(client: str, task: Task) -> dict[str, Any]:
    try:
        return {"found": start(client)(task)}
    except Exception as error:  # whatever a client raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    tasks, results = map(Path, sys.argv[1:])
    given = json.loads(tasks.read_text())
    client = given["client"]
    start(client)  # one that is not there is told at once
    with results.open("w") as file:
        for path, cache, layers in given["checkpoints"]:
            found = answer(client, Task(Path(path), given["prompts"], cache, Path(layers)))
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main()
