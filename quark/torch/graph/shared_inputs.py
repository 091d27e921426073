"""Linear layers that read the same tensor: what other software fuses into one product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_Key = tuple[Any, ...]


def same_input_groups(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Find the linear layers of one parent that receive the same tensor.

    Args:
        model: Model to watch. It is not changed.
        run: Runs data through the model once. A layer that no data reaches is in no group.

    Returns:
        Groups of two or more full names, such as those of the query, key and value projections
        of each attention block, in the order in which they run.
    """
    seen: dict[_Key, list[str]] = defaultdict(list)
    kept: list[torch.Tensor] = []  # memory is not used again, so a place means a tensor

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not args or not isinstance(args[0], torch.Tensor):
                return
            x = args[0]
            kept.append(x)
            place = (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype)
            group = seen[(name.rpartition(".")[0], *place)]
            if name not in group:
                group.append(name)

        return hook

    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [group for group in seen.values() if len(group) > 1]
