"""Layers of experts that receive the choices of a router, as Transformers declares them."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.padding import mask_of, padding


class RoutedExperts(LinearExperts):
    """A layer of experts each of which runs on the tokens that were sent to it.

    It keeps the gate and the activation of its float class.
    """

    has_gate: bool
    has_post_expert_norm = False
    act_fn: Any
    post_expert_norm: Any

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of the experts of each token.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: (tokens, k) experts; the output of ``num_experts`` and above is 0.
            top_k_weights: (tokens, k) factors of the outputs.
        """
        if torch.compiler.is_compiling():
            placed = self._traced_outputs(hidden_states, top_k_index)
            return self._weighted_sum(placed, top_k_weights, hidden_states.dtype)
        # Sort the (token, choice) pairs by expert, so that each expert runs once on its tokens.
        # Example, k = 2 and the choices [[1, 0], [0, 2]]: order = [1, 2, 0, 3], the tokens
        # order // 2 = [0, 1, 0, 1], of which experts 0, 1, 2 take 2, 1 and 1.
        width = top_k_index.shape[-1]
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        rows = torch.split(hidden_states[order // width], counts)
        mask = mask_of(hidden_states)  # (tokens,)
        sent = torch.ones_like(order, dtype=torch.bool) if mask is None else mask[order // width]
        masks = torch.split(sent, counts)
        if self._calls is not None:
            received = [int(kept.sum()) for kept in masks][: self.num_experts]
            if self.observes_all:
                received = [len(hidden_states) if mask is None else int(mask.sum())] * len(received)
                self._observe_others(hidden_states, top_k_index, mask)
            self._calls.append(received)
        results = []
        for expert, (x, kept) in enumerate(zip(rows, masks, strict=True)):
            with padding(None if mask is None else kept):
                is_used = len(x) and expert < self.num_experts
                results.append(self._expert(expert, x) if is_used else torch.zeros_like(x))
        outputs = torch.cat(results)
        placed = torch.empty_like(outputs)
        placed[order] = outputs
        return self._weighted_sum(placed, top_k_weights, hidden_states.dtype)

    @torch.no_grad()
    def _observe_others(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """Run each observed expert on the tokens that the router sends to others.

        Nothing reads the outputs, so those of the layer keep their bits.
        """
        for expert in range(self.num_experts):
            others = (top_k_index != expert).all(-1)
            if bool(others.any()) and self._is_observed(expert):
                with padding(None if mask is None else mask[others]):
                    self._expert(expert, hidden_states[others])

    def _is_observed(self, expert: int) -> bool:
        """Whether a hook or a quantizer observes the inputs of a layer of an expert."""
        modules = self.get_submodule(str(expert)).modules()
        return any(m._forward_pre_hooks or getattr(m, "is_observing", False) for m in modules)

    def _weighted_sum(
        self, outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return (tokens, hidden) from outputs (tokens * k, hidden) and weights (tokens, k)."""
        products = outputs * weights.reshape(-1, 1)
        return products.view(*weights.shape, outputs.shape[-1]).sum(-2).to(dtype)

    def _traced_outputs(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of each (token, choice) pair, (tokens * k, hidden), for a graph.

        A graph has one path for all inputs. So every expert runs, on its tokens in their order, as
        in ``forward``; there may be none.
        """
        width, chosen = top_k_index.shape[-1], top_k_index.reshape(-1)
        placed = None
        for expert in range(self.num_experts):
            (pairs,) = (chosen == expert).nonzero(as_tuple=True)
            y = self._expert(expert, hidden_states[pairs // width])
            if placed is None:
                placed = y.new_zeros(chosen.shape[0], y.shape[-1])
            placed[pairs] = y
        assert placed is not None
        return placed

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        first, out = self.stacks.values()
        expert: Any = self._modules[str(index)]
        hidden = torch.cat([getattr(expert, part)(x) for part in first.parts], -1)
        hidden = (
            self.float_class._apply_gate(self, hidden) if self.has_gate else self.act_fn(hidden)
        )
        y: torch.Tensor = getattr(expert, out.parts[0])(hidden)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y
