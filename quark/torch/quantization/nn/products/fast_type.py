"""The float type in which this CPU multiplies matrices fastest."""

from __future__ import annotations

import time
from functools import cache

import torch

_ROWS, _SIDE, _ROUNDS = 128, 512, 3
_CLEARLY = 0.8  # of the time of float32: nearly equal times would choose by chance


def multiplied_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which unpacked panels are multiplied, for inputs in a type.

    It is float32, except that inputs in bfloat16 stay in it on CPUs that multiply bfloat16 clearly
    faster. Some CPUs have instructions for bfloat16 and are slower with them.
    """
    is_fast = dtype == torch.bfloat16 and _multiplies_bfloat16_fast()
    return dtype if is_fast else torch.float32


@cache
def _multiplies_bfloat16_fast() -> bool:
    """Time products in both types, in turns; the answer is kept for this process."""
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    with torch.inference_mode():
        pairs = {
            t: (
                torch.ones(_ROWS, _SIDE, dtype=t, device="cpu"),
                torch.ones(_SIDE, _SIDE, dtype=t, device="cpu").T,
            )
            for t in seconds
        }
        outputs = {t: torch.empty(_ROWS, _SIDE, dtype=t, device="cpu") for t in seconds}
        for _ in range(_ROUNDS + 1):  # the first round also prepares the products
            for dtype, pair in pairs.items():
                start = time.perf_counter()
                torch.mm(*pair, out=outputs[dtype])
                seconds[dtype] = min(seconds[dtype], time.perf_counter() - start)
    return seconds[torch.bfloat16] < _CLEARLY * seconds[torch.float32]
