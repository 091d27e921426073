"""Statistics of a float model and its data, which any number of quantization runs can use."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.graph.residency import iterate_parts
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.batches import split_sequences
from quark.torch.pipeline.tensor_ranges import TensorRange, ranges_suffice
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

GIVE_DATA = "give data (dataloader, or --dataset)"  # what to do, in Python and in commands


class Probe(NamedTuple):
    """The effect on the model of rounding the weights of one unit alone to a few bits.

    Attributes:
        divergence: KL divergence from the predictions of the float model, summed over tokens, nats.
        tokens: Number of these tokens.
        error: Squared error of the outputs of the unit, summed over all tokens of the data.
    """

    divergence: float
    tokens: int
    error: float

    @property
    def sensitivity(self) -> float:
        """Divergence in nats per token, per unit of squared error.

        Divergences below 0 are rounding errors.
        """
        return max(self.divergence, 0.0) / max(self.tokens, 1) / self.error if self.error else 0.0


@dataclass(frozen=True)
class Statistics:
    """Statistics of the linear layers in the decoder blocks of a float model.

    Layers that read the same tensor share the statistics of their input, which are stored under
    the name of the first of them (``readers``).

    Attributes:
        model: Digest of each parameter and buffer of the model, by name.
        data: Digest of the sequences of the data.
        readers: Layer to the first of the layers that read the same tensor.
        inputs: Sums over the tokens of inputs, by first reader, in memory or on disk.
        tokens: Number of these tokens, by first reader.
        units: Layers that share a format: corresponding layers of experts, else one layer each.
        probes: Layer to the effect of rounding its unit alone to two bits. Empty if it was not
            measured.
        samples: A sample of the tokens of inputs by first reader, (tokens, inputs) in the dtype of
            the model. Layers that no data reached are left out.
        ranges: Ranges of inputs by first reader, and of the outputs of all layers, without
            padding, by ``tensor_key``. Layers that no data reached are left out.
        letters: Script to the number of its letters in the data; empty if the text is not known.
        fine_probes: Layer to the effect of rounding its unit alone to four bits. Empty if it was
            not measured, as by earlier versions.
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
    letters: Mapping[str, int] = field(default_factory=dict)
    fine_probes: Mapping[str, Probe] = field(default_factory=dict)

    def loss(self, name: str, error: float) -> float:
        """Return the loss of predictions, in nats per token, for an error of the outputs of a unit.

        It is the power law through both probes between their errors, and proportional to the error
        beyond, or with one probe.

        Args:
            name: Name of a layer of the unit, with probes.
            error: Squared error of the outputs of its unit, summed over all tokens of the data.
        """
        coarse, fine = self.probes[name], self.fine_probes.get(name, self.probes[name])
        if error <= fine.error:
            return max(error, 0.0) * fine.sensitivity
        if error >= coarse.error or not coarse.sensitivity or not fine.sensitivity:
            return error * coarse.sensitivity
        share = math.log(error / fine.error) / math.log(coarse.error / fine.error)
        return error * math.exp(
            (1 - share) * math.log(fine.sensitivity) + share * math.log(coarse.sensitivity)
        )

    def check(self, model: nn.Module, batches: Iterable[Any] | None = None) -> None:
        """Raise if the statistics belong to another model or to other data.

        Args:
            model: The float model.
            batches: The data, None for any.

        Raises:
            ValueError: They do; the message names a tensor that differs.
        """
        digests = model_digests(model)
        others = differing_names(self.model, digests)
        if others:
            raise ValueError(
                f"The statistics are of another model: {len(others)} of its {len(digests)} tensors "
                f"differ, such as {others[0]}. Load the model that they were collected from, in "
                "the same type, or collect them anew."
            )
        if batches is not None and data_digest(batches) != self.data:
            raise ValueError(
                "The statistics are of other data than the dataloader gives. Leave one of them "
                "out, or collect statistics with this data."
            )

    def grams(self, layers: Mapping[str, FakeQuantizedLayer]) -> dict[str, Gram]:
        """Return copies of the sums for layers, one copy for layers that read the same tensor.

        Raises:
            ValueError: The statistics lack a layer.
        """
        copies: dict[str, Gram] = {}
        for name, layer in layers.items():
            first = self.first_reader(name)
            if first not in copies:
                _check_width(self.inputs[first], name, layer)
                copies[first] = self.inputs[first].to(layer.weight.device, copy=True)
        return {name: copies[self.readers[name]] for name in layers}

    def range_of(self, name: str, tensor: str) -> TensorRange:
        """Return the range of the inputs or outputs of a layer, empty if no data reached it.

        Args:
            name: Name of the layer.
            tensor: ``"input_tensors"`` or ``"output_tensors"``.

        Raises:
            ValueError: The statistics lack the layer.
        """
        first = self.first_reader(name)
        key = tensor_key(first if tensor == "input_tensors" else name, tensor)
        return self.ranges.get(key) or TensorRange()

    def sample(self, name: str) -> torch.Tensor | None:
        """Return a sample of the inputs of a layer, (tokens, inputs); None if no data reached it.

        Raises:
            ValueError: The statistics lack the layer.
        """
        return self.samples.get(self.first_reader(name))

    def first_reader(self, name: str) -> str:
        """Return the first of the layers that read the same tensor as a layer.

        Raises:
            ValueError: The statistics lack the layer.
        """
        first = self.readers.get(name)
        if first is None:
            raise ValueError(
                f"The statistics lack {name}: they hold linear layers of decoder blocks only. "
                f"Exclude it, or {GIVE_DATA} instead."
            )
        return first

    def check_ranges(self, layers: Mapping[str, QuantizationConfig]) -> None:
        """Raise if static ranges of activations cannot be computed from the stored ranges.

        Args:
            layers: Configurations by name of the layer.

        Raises:
            ValueError: The statistics lack a layer, or an observer needs the data itself.
        """
        for name, layer in layers.items():
            for tensor, spec in layer.specs():
                if tensor in PARAMETERS or not spec.needs_data:
                    continue
                self.first_reader(name)
                if not ranges_suffice(spec):
                    kind = (
                        "no observer" if spec.observer_cls is None else spec.observer_cls.__name__
                    )
                    raise ValueError(
                        f"{name}.{tensor}: {kind} needs the data itself; statistics hold ranges "
                        "of whole tensors and of channels, and histograms. "
                        f"Leave the statistics out, and {GIVE_DATA}."
                    )


def _check_width(gram: Gram, name: str, layer: FakeQuantizedLayer) -> None:
    inputs = layer.weight.shape[layer.input_axis]
    if gram.total is not None and len(gram.total) != inputs:
        raise ValueError(
            f"The statistics of {name} have {len(gram.total)} inputs, the layer {inputs}: collect "
            "them anew."
        )


def tensor_key(name: str, tensor: str) -> str:
    """Return the key of ``"input_tensors"`` or ``"output_tensors"`` of a layer."""
    return f"{name}.{tensor}"


def differing_names(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the keys under which two mappings have different values."""
    return [key for key in {**first, **second} if first.get(key) != second.get(key)]


def model_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of each parameter and buffer of a model, by name."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    digests: dict[str, str] = {}
    for part in iterate_parts(model):
        inside = {n: x for n, x in tensors.items() if part.holds(n.rpartition(".")[0])}
        digests |= {name: digest(tensor) for name, tensor in inside.items()}
    return {name: digests.get(name) or digest(tensor) for name, tensor in tensors.items()}


def digest(*values: Any) -> str:
    """Return a digest of tensors, by their bits, dtypes and shapes, and of other values."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            x = value.detach().cpu().contiguous()
            sha.update(f"{x.dtype} {tuple(x.shape)}".encode())
            sha.update(x.flatten().view(torch.uint8).numpy().data)
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()


def data_digest(batches: Iterable[Any]) -> str:
    """Return a digest of batches, of any documented kind, whatever the sizes of the batches."""
    return digest(*sequence_digests(batches))


def sequence_digests(batches: Iterable[Any]) -> Iterator[str]:
    """Iterate over a digest of each sequence of batches; see ``split_sequences``."""
    for batch in split_sequences(batches):
        if hasattr(batch, "items"):
            yield digest(*(x for item in sorted(batch.items()) for x in item))
        else:
            yield digest(*(batch if isinstance(batch, (list, tuple)) else [batch]))
