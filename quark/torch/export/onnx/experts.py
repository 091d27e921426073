"""Layers of experts as the exporter of torch traces them."""

from __future__ import annotations

import torch
from torch import nn

from quark.torch.quantization.nn.experts import LinearExperts, unfuse
from quark.torch.quantization.nn.layer import become


class OnnxExperts(LinearExperts):
    """A layer of experts that a graph holds: each computes the tokens that come to it alone.

    Which tokens these are is found by NonZero, so that their number is one of the run, not one of
    the trace.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send tokens through their experts and add up what these return.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: Expert of each of the (tokens, k); those from ``num_experts`` on give 0.
            top_k_weights: Factor of each of the (tokens, k).
        """
        dtype = torch.result_type(hidden_states, top_k_weights)
        summed = torch.zeros_like(hidden_states, dtype=dtype)
        for expert in range(self.num_experts):
            rows, places = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[rows])
            y = y * top_k_weights[rows, places].unsqueeze(-1)
            summed = summed.index_add(0, rows, y.to(dtype))
        return summed.to(hidden_states.dtype)


def trace_experts(model: nn.Module) -> None:
    """Make all layers of experts such that they can be traced, in place, float ones as well."""
    unfuse(model)
    for module in list(model.modules()):
        if isinstance(module, LinearExperts):
            become(module, OnnxExperts)
