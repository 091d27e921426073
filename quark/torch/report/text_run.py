"""Runs of the original and of the quantized model on a text, for a report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from quark.torch.evaluation.predictions import Predictions, Reference
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.interleaved_passes import Pass, Steps, complete, run_in_turn
from quark.torch.quantization.nn.packed import PackedLayer, packed_layers
from quark.torch.report.activations import InputRecord, recording_inputs
from quark.torch.report.continuation import Continuation, Prompt
from quark.torch.report.unseen_inputs import (
    CalibrationText,
    TokenInputs,
    UnseenInputs,
    find_unseen_inputs,
)

Load = Callable[[], nn.Module]


@dataclass
class TextRun:
    """Runs of both models on windows of tokens, and what they found.

    Models in memory run one after the other, so that memory holds one of them. Models that are read
    in parts take turns, without continuations, and with one window at a time: as many windows as
    fit may differ between both.

    Args:
        windows: Token identifiers, (windows, length).
        batch_size: Windows that run together.
        reference: Predictions of the original.
        samples: Store for a sample of the inputs of layers.
        prompt: Text that the models continue, or None.
        calibration: Calibration text, whose inputs those of the original are compared with.
        streams: Whether the models are read in parts.

    Attributes:
        records: Records of the inputs of the layers of the quantized model.
        predictions: Its predictions, compared with those of the original; None before it ran.
        unseen: Inputs of the original that the calibration text hardly had.
        continuations: Continuation of each model that ran.
    """

    windows: torch.Tensor
    batch_size: int
    reference: Reference
    samples: ActivationStore
    prompt: Prompt | None = None
    calibration: CalibrationText | None = None
    streams: bool = False
    records: dict[str, InputRecord] = field(default_factory=dict)
    predictions: Predictions | None = None
    unseen: UnseenInputs | None = None
    continuations: dict[str, Continuation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.streams:
            self.batch_size, self.prompt = 1, None

    def run(self, load_original: Load | None, load: Load) -> nn.Module:
        """Run both models.

        Args:
            load_original: Loads the original; None without one.
            load: Loads the quantized model.

        Returns:
            The quantized model.
        """
        if load_original is not None and self.streams:
            original, model = load_original(), load()
            passes = [Pass(original, self._run_original(original)), Pass(model, self._run(model))]
            run_in_turn(passes, self.reference.drop_predictions)
            return model
        if load_original is not None:
            complete(self._run_original(load_original()))
        model = load()
        complete(self._run(model))
        return model

    def _run_original(self, model: nn.Module) -> Steps[None]:
        self._continue("original", model)
        run = partial(self.reference.run_steps, model, self.windows, self.batch_size)
        if self.calibration is None:
            yield from run()
            return
        statistics = self.calibration.statistics
        statistics.check(model)
        with ActivationStore() as store:
            inputs = TokenInputs([*statistics.inputs], self.windows, store)
            yield from run(observe=partial(inputs.record, model))
            self.unseen = find_unseen_inputs(inputs, self.calibration)

    def _run(self, model: nn.Module) -> Steps[None]:
        layers: dict[str, PackedLayer] = packed_layers(model)
        self.records = {name: InputRecord() for name, layer in layers.items() if layer.is_linear}
        calls = -(-len(self.windows) // self.batch_size)
        observe = partial(recording_inputs, layers, self.records, self.samples, calls)
        self._continue("quantized", model)
        self.predictions = yield from self.reference.compare_steps(
            model, self.windows, self.batch_size, observe
        )

    def _continue(self, name: str, model: nn.Module) -> None:
        if self.prompt is not None:
            self.continuations[name] = self.prompt.answer(model)
