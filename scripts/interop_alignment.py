"""A client beside a model, layer by layer: each linear layer is given what the client's was given.

A value halfway between two codes goes to either, and sums in another order move it. What follows
such a value differs by as much as quantization itself, however alike two programs are. Here it does
not spread: a layer starts from the very numbers that the client's started from.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interop_workers import LogProbabilities, of_model
from safetensors.torch import load_file
from torch import Tensor

from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer


class Alignment(NamedTuple):
    """The largest differences of a model from a client.

    Attributes:
        aligned: Of log-probabilities.
        layers: Of what a linear layer gives, relative to the largest value that it gives.
        between: Of what a linear layer is given by those before it, likewise.
    """

    aligned: float
    layers: float
    between: float


def align(model: Any, file: Path, prompts: list[list[int]], found: LogProbabilities) -> Alignment:
    """Compare a model with a client that wrote to ``file`` what its layers took and gave.

    Args:
        model: The quantized model in memory.
        file: Tensors (tokens of all prompts, features) by the name of the layer and ``.input`` or
            ``.output``.
        prompts: Token ids.
        found: The client's log-probabilities.
    """
    heard = load_file(file)
    every: tuple[list[Tensor], ...] = [], [], []
    aligned, layers, between = every
    own: dict[str, Tensor] = {}  # of one prompt

    def before(name: str, _: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        theirs = own[f"{name}.input"]
        between.append(relative(given[0], theirs))
        return (theirs,)

    def after(name: str, layer: Any, _: Any, output: Tensor) -> Tensor:
        theirs = own[f"{name}.output"]
        layers.append(relative(output, theirs))
        return layer.quantized_output(theirs) if name in rounding else output

    hooks, rounding = [], set()  # layers that round for the cache what a client's give to it
    for name in {key.rpartition(".")[0] for key in heard}:
        layer = model.get_submodule(name)
        if (
            isinstance(layer, FakeQuantizedLayer)
            and layer.output_quantizer
            and layer.quantizes_output
        ):
            rounding.add(name)
            layer.quantizes_output = False
        hooks.append(layer.register_forward_pre_hook(partial(before, name)))
        hooks.append(layer.register_forward_hook(partial(after, name)))
    split = {key: rows.split([len(ids) for ids in prompts]) for key, rows in heard.items()}
    for i, ids in enumerate(prompts):
        own = {key: parts[i].unsqueeze(0) for key, parts in split.items()}
        ours, theirs = torch.tensor([*of_model(model, [ids]), found[i]], dtype=torch.float64)
        aligned.append((ours - theirs).abs().max())
    for hook in hooks:
        hook.remove()
    for name in rounding:
        model.get_submodule(name).quantizes_output = True
    return Alignment(*(torch.stack(values).max().item() for values in every))


def relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the largest difference as a share of the largest value."""
    return (ours - theirs).abs().max() / theirs.abs().max()
