"""Layers of experts that receive inputs for every expert, as those of Llama 4.

Such a layer multiplies (experts, tokens, in) by stacked weights (experts, in, out). The inputs of
an expert are zero for tokens that the router sends to others. Nothing declares the layer; it is
found by its parameters and its one input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.nn.linear_experts import LinearExperts, Stack
from quark.torch.quantization.nn.padding import mask_of, padding

STACKS = {
    "gate_up_proj": Stack(("gate_proj", "up_proj"), is_transposed=True, is_merged=False),
    "down_proj": Stack(("down_proj",), is_transposed=True, is_merged=False),
}
_PRODUCTS = (torch.bmm, torch.matmul, torch.Tensor.bmm, torch.Tensor.matmul)


class GroupedExperts(LinearExperts):
    """A layer of experts that computes as its float class does, with linear layers for products.

    Attributes:
        shapes: Shape of each stacked parameter, by its name.
    """

    shapes: dict[str, torch.Size]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts.

        Args:
            hidden_states: (experts * tokens, hidden), those of the first expert first.
        """
        if self._calls is not None and not torch.compiler.is_compiling():
            self._observe(hidden_states)
        outputs: torch.Tensor = self.float_class.forward(self, hidden_states)
        return outputs

    @torch.no_grad()
    def _observe(self, hidden_states: torch.Tensor) -> None:
        """Count the tokens of each expert; let all experts receive all tokens, if that is wanted.

        Other experts receive what the experts of a token do.
        """
        assert self._calls is not None
        x = hidden_states.view(self.num_experts, -1, hidden_states.shape[-1])
        sent, mask = x.any(-1), mask_of(x[0])
        counted = torch.ones_like(sent) if self.observes_all else sent
        self._calls.append((counted if mask is None else counted & mask).sum(1).tolist())
        if self.observes_all:
            others = x.sum(0).masked_fill(sent.unsqueeze(-1), 0)
            self.float_class.forward(self, others.flatten(0, 1))

    def __getattr__(self, name: str) -> Any:
        """Return a stacked weight, which the float class multiplies by."""
        is_stack = name in vars(self).get("stacks", ())
        return _StackedWeight(self, name) if is_stack else super().__getattr__(name)


class _StackedWeight:
    """Takes the place of a stacked weight, (experts, in, out), in a product with it."""

    def __init__(self, experts: GroupedExperts, name: str) -> None:
        count, self.shape = experts.num_experts, experts.shapes[name]
        places = experts.stacks[name].layer_names(count)
        layers = [experts.get_submodule(place) for place in places]
        self._layers = [layers[expert::count] for expert in range(count)]  # of 1 of 4: 1, 5, …

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Multiply (experts, tokens, in) by the weight: (experts, tokens, out).

        Raises:
            NotImplementedError: It is not such a product.
        """
        if function not in _PRODUCTS or kwargs or not isinstance(args[1], cls):
            name = getattr(function, "__name__", function)
            raise NotImplementedError(
                f"A layer of experts gives its stacked weight to {name}, not to torch.bmm: exclude "
                "the layer."
            )
        x, weight = args
        return torch.stack([_apply(*pair) for pair in zip(weight._layers, x, strict=True)])


def _apply(layers: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of the layers of an expert, side by side: (tokens, out).

    Layers have no bias, so outputs are zero where inputs are. Other tokens alone run.
    """
    if torch.compiler.is_compiling():
        return torch.cat([layer(x) for layer in layers], -1)
    sent, mask = x.any(-1), mask_of(x)
    with padding(None if mask is None else mask[sent]):
        outputs = torch.cat([layer(x[sent]) for layer in layers], -1)
    placed = outputs.new_zeros(len(x), outputs.shape[-1])
    placed[sent] = outputs
    return placed


def is_grouped(module: nn.Module) -> bool:
    """Whether a module is a layer of stacked experts that receives inputs for every expert."""
    if set(module._parameters) != set(STACKS) or hasattr(module, "has_gate"):
        return False
    weights = [module._parameters[name] for name in STACKS]
    shapes = [weight.shape for weight in weights if weight is not None]
    if [len(shape) for shape in shapes] != [3, 3]:
        return False
    (experts, hidden, widths), (others, width, outputs) = shapes
    arguments = list(inspect.signature(type(module).forward).parameters)[1:]
    return (
        len(arguments) == 1
        and experts == others == getattr(module, "num_experts", None)
        and (hidden, widths) == (outputs, 2 * width)
    )


def chosen_experts(hidden_states: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the experts of each token, (tokens, k), by the inputs of a layer.

    Args:
        hidden_states: See ``GroupedExperts.forward``.
        experts: Number of experts.
    """
    sent = hidden_states.view(experts, -1, hidden_states.shape[-1]).any(-1)
    return sent.byte().topk(int(sent.sum(0).max()), dim=0).indices.T
