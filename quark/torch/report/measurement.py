"""Measurement of a quantized checkpoint: the numbers of a report.

The checkpoint stays packed in memory. Weights of the original are read one by one. The original is
loaded as a whole only to compare predictions, before the checkpoint is loaded. Models that are read
in parts run side by side: each block of both is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.predictions import Predictions, Reference
from quark.torch.evaluation.scripts import read_shares
from quark.torch.export.checkpoint.config_json import ALGORITHMS, notes_of
from quark.torch.export.checkpoint.reader import Loading
from quark.torch.export.checkpoint.streamed_model import stream_loading
from quark.torch.export.checkpoint_contents import weight_bytes
from quark.torch.export.containers.base import Container
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.recognition import (
    exceeds_memory,
    load_in_float,
    reading,
    recognize_container,
)
from quark.torch.graph.residency import resident
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.memory_limit import results_limit
from quark.torch.quantization.config.description import describe_layer
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.packed import PackedLayer, packed_layers
from quark.torch.quantization.nn.router_choices import describe_agreement
from quark.torch.report.activations import (
    InputRecord,
    inputs_of,
    output_error,
    sample_of,
)
from quark.torch.report.advice import few_windows, is_harmless, ranked, verdict, worst_layers
from quark.torch.report.contents import Report, Text
from quark.torch.report.continuation import Prompt
from quark.torch.report.layer import Layer
from quark.torch.report.original_weights import OriginalWeights
from quark.torch.report.remedies import remedies
from quark.torch.report.storage import float_parts, kind_of, kinds
from quark.torch.report.text_run import Load, TextRun
from quark.torch.report.unseen_inputs import (
    CalibrationText,
    describe_unseen_inputs,
)
from quark.torch.report.weights import (
    compare,
    histogram,
    scales_of,
    values_of,
)

SHOWN = 400  # layers with the largest errors, whose histograms are kept


def measure(
    directory: str | Path,
    original: str | Path | None = None,
    windows: torch.Tensor | None = None,
    source: str = "",
    batch_size: int = 8,
    device: str = "cpu",
    trust_remote_code: bool = False,
    max_memory: int | None = None,
    calibration: CalibrationText | None = None,
    prompt: Prompt | None = None,
) -> Report:
    """Measure a quantized checkpoint, and compare it with the original if that is given.

    Args:
        directory: Directory of a checkpoint, or a file, of any container that is read.
        original: The model that it was made from, likewise; a quantized one is dequantized.
        windows: Token identifiers, (windows, length), to run the models on.
        source: Name of their source, for the report.
        batch_size: Windows that run together.
        device: Where the models run.
        trust_remote_code: Passed to Transformers.
        max_memory: Bytes that this process may take; windows then run one by one.
        calibration: Calibration text, whose inputs those of ``windows`` are compared with.
        prompt: Text that both models continue, unless they are read in parts. Needs ``windows``.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A checkpoint is damaged or not quantized; the original or that of the
            calibration text is another model; or ``calibration`` lacks original or windows.
    """
    _check_calibration(calibration, original, windows)
    container, loading = _open(Path(directory), trust_remote_code)
    layers = packed_layers(loading.model)
    weights = _original_weights(original, layers, trust_remote_code)
    sizes = [container.size(Path(directory)), 0 if weights is None else weights.bytes]
    streams = max_memory is not None or exceeds_memory(max(sizes), device)
    limit = results_limit(streams, max_memory, device)
    with ActivationStore(limit) as logits, ActivationStore(limit) as samples:
        text, reference = None, Reference(logits)
        load = partial(_load, loading, streams, max_memory, device)
        if windows is None:
            model = load()
        else:
            text = TextRun(windows, batch_size, reference, samples, prompt, calibration, streams)
            given = ("auto", trust_remote_code, False, max_memory, device)
            model = text.run(_original_loader(original, *given), load)
        records = {} if text is None else text.records
        measured = _Maker.of(loading, model, records, samples).measure(_pairs(layers, weights))
    return _report(
        loading,
        [measured[name] for name in layers],
        directory=str(directory),
        method=loading.fmt.name if container.has_formats else container.name,
        original="" if original is None else str(original),
        original_bytes=None if weights is None else weights.bytes,
        experts=_experts(model, records),
        routers=reference.agreement,
        **_describe_text(text, source, model),
    )


def _check_calibration(
    calibration: CalibrationText | None, original: str | Path | None, windows: torch.Tensor | None
) -> None:
    if calibration is not None and (original is None or windows is None):
        raise ValueError("calibration needs the original and windows of text: give both.")


def _open(path: Path, trust_remote_code: bool) -> tuple[Container, Loading]:
    container = recognize_container(path)
    with reading(path):
        return container, container.open(path, trust_remote_code)


def _original_weights(
    original: str | Path | None, layers: Mapping[str, PackedLayer], trust_remote_code: bool
) -> OriginalWeights | None:
    if original is None:
        return None
    weights = OriginalWeights(Path(original), trust_remote_code)
    weights.check({name: layer.shapes["weight"] for name, layer in layers.items()})
    return weights


def _original_loader(original: str | Path | None, *given: Any) -> Load | None:
    return None if original is None else partial(load_in_float, original, *given)


def _load(loading: Loading, streams: bool, max_memory: int | None, device: str) -> nn.Module:
    if streams:
        return stream_loading(loading, max_memory, device)
    return loading.fill().to(device)


def _describe_text(text: TextRun | None, source: str, model: nn.Module) -> dict[str, Any]:
    """Return the fields of a report that describe a text, and what models predict for it."""
    if text is None:
        nothing = dict.fromkeys(("text", "predictions", "unseen"))
        return {"prompt": "", "continuations": {}, **nothing}
    notes = notes_of(getattr(model, "config", None))
    calibrated = read_shares(notes.get("calibration_scripts", ""))
    count, length = text.windows.shape
    return {
        "text": Text(source, count, length, calibrated=calibrated),
        "predictions": text.predictions,
        "unseen": text.unseen,
        "prompt": "" if text.prompt is None else text.prompt.text,
        "continuations": text.continuations,
    }


def _describe_few_windows(text: Text | None, predictions: Predictions | None) -> list[str]:
    """Return a warning about standard errors from few windows; empty where there are none."""
    if text is None or predictions is None or predictions.change_error is None:
        return []
    few = few_windows(text.windows)
    return [few] if few else []


def _report(loading: Loading, layers: list[Layer], **known: Any) -> Report:
    """Return the report; ``known`` has the figures that come from other sources."""
    model, config = loading.model, loading.fmt.config
    algorithms = tuple(options.name for options in config.algo_config or [])
    noted = notes_of(getattr(model, "config", None)).get(ALGORITHMS)
    if noted not in (None, "none"):
        algorithms = tuple(dict.fromkeys([*algorithms, *noted.split(", ")]))
    names_algorithms = noted is not None or known["method"] == QuarkFormat.name
    total = sum(entry.nbytes for entry in loading.reader.entries.values())
    floats = float_parts(model, config)
    configs = {name: layer.quant_config for name, layer in packed_layers(model).items()}
    return Report(
        model_type=str(getattr(getattr(model, "config", None), "model_type", "unknown")),
        algorithms=algorithms,
        bytes=total,
        verdict=[
            *verdict(total, known["original_bytes"], known["predictions"], layers, floats),
            *_describe_few_windows(known["text"], known["predictions"]),
            *([describe_agreement(known["routers"])] if known["routers"] else []),
            *([describe_unseen_inputs(known["unseen"])] if known["unseen"] else []),
        ],
        advice=[]
        if is_harmless(known["predictions"])
        else remedies(layers, configs, algorithms, config.exclude, names_algorithms),
        worst=worst_layers(layers),
        kinds=kinds(layers, floats, total),
        layers=_with_few_histograms(layers),
        floats=floats,
        **known,
    )


def _pairs(
    layers: Mapping[str, PackedLayer], weights: OriginalWeights | None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate over layers with their original weights, None without an original."""
    found = ((name, None) for name in layers) if weights is None else weights.weights(layers)
    yield from show_progress(_Sized(found, len(layers)), "layers")


@dataclass(frozen=True)
class _Sized:
    """An iterator with a length, for the display of progress."""

    items: Iterator[tuple[str, torch.Tensor | None]]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self.items


@dataclass(frozen=True)
class _Maker:
    """Measures one layer after another."""

    model: nn.Module
    layers: Mapping[str, PackedLayer]
    bytes: Mapping[str, int]
    records: Mapping[str, InputRecord]
    samples: ActivationStore
    caches: Sequence[str]  # patterns of the layers that write the key-value cache

    @classmethod
    def of(
        cls,
        loading: Loading,
        model: nn.Module,
        records: Mapping[str, InputRecord],
        samples: ActivationStore,
    ) -> _Maker:
        """Return what measures the layers of a checkpoint."""
        layers = packed_layers(model)
        sizes = weight_bytes(loading.reader.entries, layers)
        caches = loading.fmt.config.kv_cache_patterns
        return cls(model, layers, sizes, records, samples, caches)

    def measure(self, pairs: Iterator[tuple[str, torch.Tensor | None]]) -> dict[str, Layer]:
        """Return the figures of layers, given with their weights in the original."""
        return {name: self(name, weight) for name, weight in pairs}

    @torch.inference_mode()
    def __call__(self, name: str, original: torch.Tensor | None) -> Layer:
        """Return the figures of a layer, given its weight in the original if there is one."""
        with resident(self.model, name):
            return self._figures(name, original)

    def _figures(self, name: str, original: torch.Tensor | None) -> Layer:
        layer = self.layers[name]
        weight = layer.value("weight", torch.float32)
        assert weight is not None
        error = reference = inputs = lost = None
        if original is not None:
            original = layer.prepared_weight(original.to(weight))
            error, reference = compare(original, layer.weight_with_branch(weight))
        record = self.records.get(name)
        if record is not None and record.tokens:
            sample = sample_of(record, self.samples).to(weight.device)
            inputs = inputs_of(layer, record, sample)
            lost = None if reference is None else output_error(layer, reference, sample)
        state = layer.quantized_tensor("weight")
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


def _with_few_histograms(layers: list[Layer]) -> list[Layer]:
    kept = {layer.name for _, _, layer in ranked(layers)[:SHOWN]}
    return [x if x.name in kept else replace(x, histogram=None) for x in layers]


def _experts(model: nn.Module, records: Mapping[str, InputRecord]) -> dict[str, list[int]]:
    """Return the tokens that reached each expert, by layer of experts."""
    return {
        names[0].rsplit(".", 2)[0]: [records[name].tokens for name in names]
        for names in corresponding_experts(model)
        if all(name in records for name in names)
    }
