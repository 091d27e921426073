"""All that a report says of a quantized checkpoint, as numbers.

The checkpoint is held as it is stored. Of the original, one weight at a time is in memory; only to
compare predictions it is loaded whole, before the checkpoint is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.export.checkpoint.reader import Loading
from quark.torch.export.recognition import GGUF, open_checkpoint
from quark.torch.numerics.hadamard import rotate
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.batches import progress
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.nn.experts import counterparts
from quark.torch.quantization.nn.layer import is_transposed
from quark.torch.quantization.nn.packed import PackedMixin
from quark.torch.report.activations import (
    Predictions,
    Reference,
    Seen,
    inputs_of,
    output_error,
    sample_of,
    watching,
)
from quark.torch.report.advice import Worst, ranked, verdict, worst_layers
from quark.torch.report.layer import Layer
from quark.torch.report.original_weights import OriginalWeights
from quark.torch.report.storage import FloatPart, Kind, float_parts, kind_of, kinds, stored_bytes
from quark.torch.report.summary import describe_layer
from quark.torch.report.weights import (
    compare,
    histogram,
    scales_of,
    values_of,
)

SHOWN = 400  # layers that histograms are kept of: those with the largest errors


@dataclass(frozen=True)
class Text:
    """What the model was run on: where it comes from, how many windows of how many tokens."""

    source: str
    windows: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """All that is known of a quantized checkpoint.

    Attributes:
        directory: Where it is.
        original: Where the original is, "" if it is not known.
        model_type: Architecture, as ``config.json`` names it.
        method: Layout of the checkpoint.
        algorithms: What prepared the weights, as far as the checkpoint says so.
        bytes: Bytes of its tensors.
        original_bytes: Those of the original, None without one.
        text: What the model was run on, None without data.
        predictions: What came of that.
        verdict: What it comes to, in sentences.
        worst: The layers with the largest errors, and what may help.
        kinds: What all layers of a kind take.
        layers: The quantized layers in the order of the model.
        floats: What is not quantized, and why.
        experts: Tokens that reached each expert, by layer of experts; none without data.
    """

    directory: str
    original: str
    model_type: str
    method: str
    algorithms: tuple[str, ...]
    bytes: int
    original_bytes: int | None
    text: Text | None
    predictions: Predictions | None
    verdict: list[str]
    worst: list[Worst]
    kinds: list[Kind]
    layers: list[Layer]
    floats: list[FloatPart]
    experts: dict[str, list[int]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        found = {"quark": __version__, **asdict(self)}
        for data, layer in zip(found["layers"], self.layers, strict=True):
            data |= {"bits_per_weight": layer.bits_per_weight, "shape": list(layer.shape)}
            for part in (p for p in ("values", "original") if data[p] is not None):
                data[part]["peak"] = getattr(layer, part).peak
        found["algorithms"] = list(self.algorithms)
        return found


def measure(
    directory: str | Path,
    original: str | Path | None = None,
    windows: torch.Tensor | None = None,
    source: str = "",
    batch_size: int = 8,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Report:
    """Measure a quantized checkpoint, and what quantization changed if the original is given.

    Args:
        directory: Directory of a checkpoint of any method that is read here, or a GGUF file.
        original: Directory of the float model that it was made of.
        windows: Token identifiers, (windows, length), to run the models on.
        source: Where these come from, for the report.
        batch_size: Windows that run together.
        device: Where the models run.
        trust_remote_code: Passed to Transformers.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A checkpoint is damaged or not quantized, or the original is another model.
    """
    loading = open_checkpoint(directory, trust_remote_code)
    layers = _packed(loading.model)
    weights = None
    if original is not None:
        weights = OriginalWeights(Path(original), trust_remote_code)
        weights.check({name: layer.shapes["weight"] for name, layer in layers.items()})
    with ExitStack() as stack:
        logits, samples = (stack.enter_context(ActivationStore()) for _ in range(2))
        reference, seen, predictions = Reference(logits), dict[str, Seen](), None
        if windows is not None and original is not None:
            reference.run(_load(original, device, trust_remote_code), windows, batch_size)
        model = loading.fill().to(device)
        if windows is not None:
            with watching(layers, samples, -(-len(windows) // batch_size)) as seen:
                predictions = reference.compare(model, windows, batch_size)
        sizes, caches = stored_bytes(loading, layers), loading.fmt.config.kv_cache_patterns
        make = _Maker(layers, sizes, seen, samples, caches)
        found = {name: make(name, weight) for name, weight in _pairs(layers, weights)}
    return _report(
        loading,
        [found[name] for name in layers],
        directory=str(directory),
        method=loading.fmt.name if (Path(directory) / "config.json").is_file() else GGUF,
        original="" if original is None else str(original),
        original_bytes=None if weights is None else weights.bytes,
        text=None if windows is None else Text(source, *windows.shape),
        predictions=predictions,
        experts=_experts(model, seen),
    )


def _report(loading: Loading, layers: list[Layer], **known: Any) -> Report:
    """Return the report, given what is not read off the checkpoint and its layers."""
    model, config = loading.model, loading.fmt.config
    algorithms = tuple(options.name for options in config.algo_config or [])
    total = sum(prod(e.shape) * e.dtype.itemsize for e in loading.reader.entries.values())
    floats = float_parts(model, config)
    configs = {name: layer.quant_config for name, layer in _packed(model).items()}
    return Report(
        model_type=str(getattr(getattr(model, "config", None), "model_type", "unknown")),
        algorithms=algorithms,
        bytes=total,
        verdict=verdict(total, known["original_bytes"], known["predictions"], layers, floats),
        worst=worst_layers(layers, configs, algorithms),
        kinds=kinds(layers, floats, total),
        layers=_with_few_histograms(layers),
        floats=floats,
        **known,
    )


def _packed(model: nn.Module) -> dict[str, PackedMixin]:
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedMixin)}


def _load(directory: str | Path, device: str, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", trust_remote_code=trust_remote_code
    )
    return model.to(device)


def _pairs(
    layers: Mapping[str, PackedMixin], weights: OriginalWeights | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over layers with their original weights, None where these are not known."""
    found = ((name, None) for name in layers) if weights is None else weights.weights(layers)
    yield from progress(_Sized(found, len(layers)), "layers")


@dataclass(frozen=True)
class _Sized:
    """What is iterated over, and how many there are, for the display of progress."""

    items: Iterator[tuple[str, torch.Tensor | None]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self.items


@dataclass(frozen=True)
class _Maker:
    """Measures one layer after another."""

    layers: Mapping[str, PackedMixin]
    bytes: Mapping[str, int]
    seen: Mapping[str, Seen]
    samples: ActivationStore
    caches: Sequence[str]  # patterns of the layers that write the key-value cache

    @torch.inference_mode()
    def __call__(self, name: str, original: torch.Tensor | None) -> Layer:
        """Return what is known of a layer, given its weight in the original if there is one."""
        layer = self.layers[name]
        weight = layer.value("weight", torch.float32)
        assert weight is not None
        error = reference = inputs = lost = None
        if original is not None:
            original = _turned(layer, original.to(weight))
            error, reference = compare(original, weight)
        seen = self.seen.get(name)
        if seen is not None and seen.tokens:
            sample = sample_of(seen, self.samples).to(weight.device)
            inputs = inputs_of(layer, seen, sample)
            lost = None if reference is None else output_error(layer, reference, sample)
        state = layer.state("weight")
        return Layer(
            name=name,
            kind=kind_of(name),
            scheme=describe_layer(layer.quant_config, matches(name, self.caches)),
            shape=tuple(weight.shape),
            weights=weight.numel(),
            bytes=self.bytes[name],
            values=values_of(weight),
            original=None if original is None else values_of(original),
            scales=None if state is None else scales_of(state.scale),
            error=error,
            inputs=inputs,
            output_error=lost,
            histogram=histogram(original if reference is None else reference, weight),
        )


def _turned(layer: PackedMixin, weight: torch.Tensor) -> torch.Tensor:
    """Return an original weight for inputs that are rotated as they pass, where they are."""
    rotation = layer.input_rotation
    if rotation is None:
        return weight
    if is_transposed(layer.float_class):
        return rotate(weight.T, rotation).T
    return rotate(weight, rotation)


def _with_few_histograms(layers: list[Layer]) -> list[Layer]:
    kept = {layer.name for _, _, layer in ranked(layers)[:SHOWN]}
    return [x if x.name in kept else replace(x, histogram=None) for x in layers]


def _experts(model: nn.Module, seen: Mapping[str, Seen]) -> dict[str, list[int]]:
    """Return the tokens that reached each expert, by layer of experts."""
    return {
        names[0].rsplit(".", 2)[0]: [seen[name].tokens for name in names]
        for names in counterparts(model)
        if all(name in seen for name in names)
    }
