"""Layers of experts in a form that the exporter of torch can trace."""

from __future__ import annotations

import torch
from torch import nn

from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.layer import change_class
from quark.torch.quantization.nn.routed_experts import RoutedExperts


class OnnxExperts(RoutedExperts):
    """A layer of experts in which each expert computes only the tokens routed to it.

    NonZero selects the tokens of an expert, so their number depends on the data of each run, not
    on the data of the trace.
    """

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Route tokens to their experts and add up the weighted outputs.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: Experts of each token, (tokens, k). An index of ``num_experts`` or more
                stands for no expert.
            top_k_weights: Routing weights, (tokens, k).
        """
        dtype = torch.result_type(hidden_states, top_k_weights)
        summed = torch.zeros_like(hidden_states, dtype=dtype)
        for expert in range(self.num_experts):
            rows, places = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[rows])
            y = y * top_k_weights[rows, places].unsqueeze(-1)
            summed = summed.index_add(0, rows, y.to(dtype))
        return summed.to(hidden_states.dtype)


def make_experts_traceable(model: nn.Module) -> None:
    """Replace all layers of experts, quantized or not, by ``OnnxExperts``, in place."""
    split_experts(model)
    for module in list(model.modules()):
        if isinstance(module, RoutedExperts):
            change_class(module, OnnxExperts)
