"""What a client computes from a checkpoint. Run by the Python of the client, without this package.

    python interop_workers.py TASKS RESULTS

TASKS is a JSON file of a client, prompts (token ids) and paths; RESULTS gets a line of JSON for each
path: the log-probability of every token of every prompt but the first, or an error. Each checkpoint
is opened by a process of its own, forked when the client is imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
LogProbabilities = list[list[float]]
Compute = Callable[[Path, Prompts], LogProbabilities]


def transformers() -> Compute:
    """Return what Transformers computes, with the packages that the format needs."""
    from transformers import AutoModelForCausalLM

    def compute(path: Path, prompts: Prompts) -> LogProbabilities:
        files = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        model, report = AutoModelForCausalLM.from_pretrained(
            path.parent if files else path, dtype="auto", output_loading_info=True, **files
        )
        wrong = {what: sorted(map(str, names))[:1] for what, names in report.items() if names}
        if wrong:
            raise ValueError(str(wrong))
        return of_model(model, prompts)

    return compute


def of_model(model: Any, prompts: Prompts) -> LogProbabilities:
    """Return the log-probabilities of a model of Transformers."""
    import torch

    with torch.no_grad():
        return [of_logits(model(torch.tensor([ids])).logits[0], ids) for ids in prompts]


def of_logits(logits: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first: logits are (tokens, vocabulary)."""
    import torch

    ahead = torch.as_tensor(logits).double().log_softmax(-1)[:-1]
    found: list[float] = ahead.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return found


def vllm() -> Compute:
    """Return what vLLM computes in float32, which it offers for models in float alone."""
    import torch
    from vllm import LLM, SamplingParams
    import interop_kernels; interop_kernels.replace()
    from vllm.model_executor.layers import quantization as q

    kinds = [torch.float16, torch.bfloat16, torch.float32]
    for method in ("quark", "compressed-tensors", "gptq", "awq", "fp8", "auto_gptq", "auto_awq", "awq_marlin", "gptq_marlin"):
        try:
            config = q.get_quantization_config(method)
        except Exception as e:
            print(method, e); continue
        for k in config.__mro__:
            if "get_supported_act_dtypes" in vars(k):
                k.get_supported_act_dtypes = classmethod(lambda cls: kinds)

    def compute(path: Path, prompts: Prompts) -> LogProbabilities:
        llm = LLM(
            model=str(path),
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            enable_prefix_caching=False,
        )
        layer = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0].self_attn.qkv_proj
        s = getattr(layer, "scheme", None) or getattr(layer, "quant_method", None)
        print(path, type(s).__name__, {k: type(v).__name__ for k, v in vars(s).items() if "kernel" in k}, file=sys.stderr)
        how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        return [
            [at[token].logprob for token, at in zip(ids[1:], o.prompt_logprobs[1:], strict=True)]
            for ids, o in zip(prompts, done, strict=True)
        ]

    return compute


CLIENTS: dict[str, Callable[[], Compute]] = {"transformers": transformers, "vllm": vllm}


def in_child(compute: Compute, path: Path, prompts: Prompts) -> dict[str, Any]:
    """Return what comes of a checkpoint, or of the crash of a process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(theirs, compute, path, prompts))
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        child.join()
        found = {"error": f"the process ended with {child.exitcode}"}
    child.join()
    return found


def _report(out: Connection, compute: Compute, path: Path, prompts: Prompts) -> None:
    try:
        found: dict[str, Any] = {"found": compute(path, prompts)}
    except BaseException as error:
        import traceback; traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    out.send(found)
    out.close()
    os._exit(0)


def main() -> None:
    tasks, results = map(Path, sys.argv[1:])
    given = json.loads(tasks.read_text())
    compute = CLIENTS[given["client"]]()
    with results.open("w") as file:
        for path in given["paths"]:
            found = in_child(compute, Path(path), given["prompts"])
            print(json.dumps(found), file=file, flush=True)


if __name__ == "__main__":
    main()
