"""Statistics that outlive the data they were collected with, and the model they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quark.torch.algorithm.statistics import Gram
from quark.torch.pipeline.inference import parts
from quark.torch.quantization.nn.mixin import QuantMixin


@dataclass(frozen=True)
class Statistics:
    """What went into the linear layers of the decoder blocks of a float model.

    Attributes:
        model: Digest of each parameter and buffer of the model, by name.
        data: Digest of the batches.
        readers: Layer to the first of the layers that read the same tensor.
        inputs: Sums over the tokens of what went into these first layers, in memory or on disk.
        units: Layers that are to share a format: those of one purpose in experts, else one each.
        sensitivities: Layer to the divergence of the model's predictions, in nats per token, for
            each unit of squared error of the layer's outputs, summed over all tokens. Empty if it
            was not measured.
    """

    model: Mapping[str, str]
    data: str
    readers: Mapping[str, str]
    inputs: Mapping[str, Gram]
    units: tuple[tuple[str, ...], ...]
    sensitivities: Mapping[str, float]

    def check(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Raise if the statistics are not those of a model and data.

        Args:
            model: The float model.
            batches: The data, None for any.

        Raises:
            ValueError: They are not; a tensor that differs is named.
        """
        found = fingerprint(model)
        other = [n for n in {**self.model, **found} if self.model.get(n) != found.get(n)]
        if other:
            raise ValueError(
                f"The statistics are of another model: {len(other)} of its {len(found)} tensors "
                f"differ, such as {other[0]}. Load the model that they were collected from, in the "
                "same type, or collect them anew."
            )
        if batches is not None and data_digest(batches) != self.data:
            raise ValueError(
                "The statistics are of other data than the dataloader gives. Leave one of them "
                "out, or collect statistics with this data."
            )

    def grams(self, layers: Mapping[str, QuantMixin]) -> dict[str, Gram]:
        """Return copies of the sums for some layers, one for those that read the same tensor.

        Raises:
            ValueError: A layer was not looked at.
        """
        found: dict[str, Gram] = {}
        for name, layer in layers.items():
            first = self.readers.get(name)
            if first is None:
                raise ValueError(
                    f"The statistics have nothing of {name}: they hold linear layers of decoder "
                    "blocks alone. Exclude it, or pass a dataloader instead."
                )
            if first not in found:
                found[first] = self.inputs[first].to(layer.weight.device, copy=True)
        return {name: found[self.readers[name]] for name in layers}


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and buffer of a model, by name."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: digest(tensor) for name, tensor in tensors}


def digest(*values: Any) -> str:
    """Return a digest of tensors, bit by bit, with their types and shapes, and of other values."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            x = value.detach().cpu().contiguous()
            found.update(f"{x.dtype} {tuple(x.shape)}".encode())
            found.update(x.flatten().view(torch.uint8).numpy().data)
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


def data_digest(batches: Iterable[Any]) -> str:
    """Return a digest of batches, of any documented kind."""
    found = []
    for batch in parts(batches):
        if hasattr(batch, "items"):
            found.append(digest(*(x for item in sorted(batch.items()) for x in item)))
        else:
            found.append(digest(*(batch if isinstance(batch, (list, tuple)) else [batch])))
    return digest(*found)
