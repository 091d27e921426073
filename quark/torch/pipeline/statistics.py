"""Statistics that outlive the data they were collected with, and the model they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.batches import parts
from quark.torch.pipeline.tensor_ranges import TensorRange, is_told
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import PARAMETERS, QuantMixin


class Probe(NamedTuple):
    """What became of a model when the weights of a unit alone were rounded.

    Attributes:
        divergence: Of the predictions from those of the float model, summed over tokens, in nats.
        tokens: Number of these tokens.
        error: Squared error of the outputs of the unit, summed over all tokens of the data.
    """

    divergence: float
    tokens: int
    error: float

    @property
    def sensitivity(self) -> float:
        """Divergence in nats per token, for each unit of squared error."""
        return self.divergence / max(self.tokens, 1) / self.error if self.error else 0.0


@dataclass(frozen=True)
class Statistics:
    """What went into the linear layers of the decoder blocks of a float model.

    Attributes:
        model: Digest of each parameter and buffer of the model, by name.
        data: Digest of the batches.
        readers: Layer to the first of the layers that read the same tensor.
        inputs: Sums over the tokens of what went into these first layers, in memory or on disk.
        tokens: Number of these tokens.
        units: Layers that are to share a format: those of one purpose in experts, else one each.
        probes: Layer to what rounding its unit alone does. Empty if it was not measured.
        samples: Some of the tokens that went into these first layers, (tokens, inputs) in the type
            of the model, the same ones for all. Layers that no data reached are left out.
        ranges: What went into these first layers and what all layers gave, padding included, by
            ``place``. Layers that no data reached are left out.
    """

    model: Mapping[str, str]
    data: str
    readers: Mapping[str, str]
    inputs: Mapping[str, Gram]
    tokens: Mapping[str, float]
    units: tuple[tuple[str, ...], ...]
    probes: Mapping[str, Probe]
    samples: Mapping[str, torch.Tensor]
    ranges: Mapping[str, TensorRange]

    @cached_property
    def sensitivities(self) -> dict[str, float]:
        """Layer to what the model minds of an error of its outputs; see ``Probe``."""
        return {name: probe.sensitivity for name, probe in self.probes.items()}

    def check(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Raise if the statistics are not those of a model and data.

        Args:
            model: The float model.
            batches: The data, None for any.

        Raises:
            ValueError: They are not; a tensor that differs is named.
        """
        found = fingerprint(model)
        other = differing(self.model, found)
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
            first = self.first(name)
            if first not in found:
                found[first] = self.inputs[first].to(layer.weight.device, copy=True)
        return {name: found[self.readers[name]] for name in layers}

    def range_of(self, name: str, tensor: str) -> TensorRange:
        """Return the range of what goes into a layer or what it gives, empty if no data came.

        Args:
            name: Name of the layer.
            tensor: ``"input_tensors"`` or ``"output_tensors"``.

        Raises:
            ValueError: The layer was not looked at.
        """
        first = self.first(name)
        found = self.ranges.get(place(first if tensor == "input_tensors" else name, tensor))
        return TensorRange() if found is None else found

    def sample(self, name: str) -> torch.Tensor | None:
        """Return some of the tokens that went into a layer, (tokens, inputs); None if none did.

        Raises:
            ValueError: The layer was not looked at.
        """
        return self.samples.get(self.first(name))

    def first(self, name: str) -> str:
        """Return the first of the layers that read what a layer reads.

        Raises:
            ValueError: The layer was not looked at.
        """
        found = self.readers.get(name)
        if found is None:
            raise ValueError(
                f"The statistics have nothing of {name}: they hold linear layers of decoder "
                "blocks alone. Exclude it, or pass a dataloader instead."
            )
        return found

    def check_ranges(self, layers: Mapping[str, QuantizationConfig]) -> None:
        """Raise if settled ranges of activations of some layers are not told.

        Raises:
            ValueError: A layer was not looked at, or its ranges are not those that are kept.
        """
        for name, layer in layers.items():
            for tensor, spec in layer.specs():
                if tensor in PARAMETERS or not spec.needs_data:
                    continue
                self.first(name)
                if not is_told(spec):
                    kind = (
                        "no observer" if spec.observer_cls is None else spec.observer_cls.__name__
                    )
                    raise ValueError(
                        f"{name}.{tensor}: {kind} needs the data itself; statistics tell ranges "
                        "of whole tensors and of channels, and histograms. Pass a dataloader."
                    )


def place(name: str, tensor: str) -> str:
    """Return the name of a tensor of a layer, ``"input_tensors"`` or ``"output_tensors"``."""
    return f"{name}.{tensor}"


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names for which two mappings do not have the same."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


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
