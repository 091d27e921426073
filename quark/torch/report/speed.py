"""Speed and memory of a model that writes, on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from quark.torch.evaluation.predictions import standard_error
from quark.torch.pipeline.machine import peak_memory

REPEATS = 5


@dataclass(frozen=True)
class Speed:
    """Speed and memory of a model, for one sequence.

    Attributes:
        prompt: Tokens of the prompt per second, until the first new token is there.
        prompt_error: Standard error of ``prompt`` over repetitions.
        new: Tokens per second that follow the first new token.
        new_error: Standard error of ``new``.
        memory: Peak of the main memory of the process, the interpreter included, in bytes; None if
            unknown.
        device_memory: Peak of the memory of the GPU in bytes; None on other devices.
    """

    prompt: float
    prompt_error: float | None
    new: float
    new_error: float | None
    memory: int | None
    device_memory: int | None


@torch.inference_mode()
def measure_speed(model: Any, tokens: torch.Tensor, new_tokens: int) -> Speed:
    """Return the speed of a model of Transformers, and the memory of this process.

    Args:
        model: The model.
        tokens: Token identifiers of the prompt, (1, length).
        new_tokens: Tokens to write, two or more.
    """
    device = next(model.parameters()).device
    tokens = tokens.to(device)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        options = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
        mask = torch.ones_like(tokens)
        model.generate(tokens, attention_mask=mask, pad_token_id=0, **options).cpu()
        return time.perf_counter() - start

    seconds(2)  # what happens once is not measured
    prompt, new = [], []
    for _ in range(REPEATS):
        first = seconds(1)
        prompt.append(tokens.shape[1] / first)
        # A disturbed first token must not make the rest infinitely fast.
        new.append((new_tokens - 1) / max(seconds(new_tokens) - first, 1e-6))
    rates = [torch.tensor(values, dtype=torch.float64, device="cpu") for values in (prompt, new)]
    means = [(float(values.mean()), standard_error(values)) for values in rates]
    on_gpu = device.type == "cuda"
    return Speed(
        *means[0],
        *means[1],
        memory=peak_memory(),
        device_memory=torch.cuda.max_memory_allocated(device) if on_gpu else None,
    )
