"""The experts that routers choose for tokens, before and after a model is quantized.

The layer of experts receives the choices as its second argument, whatever the router is. If it has
one argument, its inputs tell them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.nn.experts import is_stacked
from quark.torch.quantization.nn.grouped_experts import chosen_experts
from quark.torch.quantization.nn.linear_experts import LinearExperts


class RouterChoices:
    """Experts that were chosen while data ran through a model, by layer of experts."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record the choices of data that runs inside the context."""
        handles = [
            module.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, module in model.named_modules()
            if isinstance(module, LinearExperts) or is_stacked(module)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        parts = self._parts.setdefault(name, [])

        def take(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = [*args, *kwargs.values()]
            if len(given) == 1:
                chosen = chosen_experts(given[0], module.num_experts)
            else:
                chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
            parts.append(chosen.detach().to("cpu", torch.int32))

        return take

    def agreement(self, other: RouterChoices) -> dict[str, float]:
        """Return the share of choices that another run has too, by layer of experts.

        The order of the experts of a token does not count.

        Args:
            other: Choices of a run of the same tokens.
        """
        shares: dict[str, float] = {}
        for name in (name for name, parts in self._parts.items() if parts):
            own, others = torch.cat(self._parts[name]), torch.cat(other._parts[name])
            # Example: a token with the experts (3, 0) and (0, 5): one of two, 0.5.
            is_common = (own.unsqueeze(2) == others.unsqueeze(1)).any(2)
            shares[name] = float(is_common.double().mean())
        return shares


def describe_agreement(shares: Mapping[str, float]) -> str:
    """Return a sentence about ``RouterChoices.agreement``, which is not empty."""
    least = min(shares, key=lambda name: shares[name])
    return (
        f"Routers choose {sum(shares.values()) / len(shares):.1%} of the experts that they choose "
        f"in the original, fewest in {least}: {shares[least]:.1%}."
    )
