"""A finish after quantization: a few parameters train against the predictions of the float model.

Codes stay; scales, zero points in floats, norms and biases train. A weight is linear in its scales
once the codes are fixed, so a scale s trains as the ratio r = s' / s: the weight is W r. Source:
quantization-aware distillation (arXiv 2601.20088) for the loss, EfficientQAT (arXiv 2407.11062,
section 3.3) for training scales under fixed codes. Text that is kept back decides which step is
the best, and whether one is better than none.

With a journal, each measurement leaves a file that training goes on from: parameters, both moments
of Adam, the best parameters so far, and the figures of the sequences that are kept back.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quark.torch.distillation_files import FinishFiles, Progress, State
from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.graph.alignment import align_parameters
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.residency import release, residency_of
from quark.torch.original_predictions import OriginalPredictions, logits_of
from quark.torch.pipeline.batches import padding_mask, show_progress, split_sequences
from quark.torch.pipeline.journal import Journal
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.run_steps import Finish
from quark.torch.pipeline.statistics import data_digest
from quark.torch.quantization.config.bounds import Count, InnerFraction, Positive
from quark.torch.quantization.config.value_types import check_options
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.trained_model import TrainedModel
from quark.torch.trained_parameters import TrainedParameters
from quark.torch.training import distillation_loss

logger = logging.getLogger("quark")


@dataclass(frozen=True)
class DistillationOptions:
    """Options of ``distill``.

    Attributes:
        steps: Largest number of steps.
        batch_size: Sequences of a step.
        learning_rate: Learning rate of Adam, for ratios of scales, norms and biases alike. It
            falls to zero along a half cosine.
        kept_back: Share of the sequences that do not train, but decide when to stop.
        interval: Steps between two measurements on the sequences that are kept back.
        patience: Measurements without a better one after which training stops.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of range.
    """

    steps: Count = 100
    batch_size: Count = 4
    learning_rate: Positive = 3e-3
    kept_back: InnerFraction = 0.125
    interval: Count = 10
    patience: Count = 3

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Distillation:
    """Result of ``distill``.

    Attributes:
        before: Mean KL(float ‖ quantized) at a position of the sequences kept back, nats.
        after: Likewise, after the best step; ``before`` if no step was better.
        change_error: Standard error of ``after - before``, paired over sequences; None of one.
        steps: Steps that ran.
        best: The step whose parameters the model has; 0 if none was better.
        scales: Number of scales that trained.
        zero_points: Number of zero points that trained.
        norms: Number of parameters of norms that trained.
        biases: Number of biases of quantized layers that trained.
    """

    before: float
    after: float
    change_error: float | None
    steps: int
    best: int
    scales: int
    zero_points: int
    norms: int
    biases: int


def distill(
    model: nn.Module,
    original: nn.Module,
    batches: Iterable[Any],
    options: DistillationOptions | None = None,
    journal: Journal | None = None,
) -> Distillation:
    """Train some parameters of a frozen model against the predictions of the original.

    Scales train that may take any value and belong to one weight: those of integers and floats per
    channel or per group, and the tensor scale of NVFP4. So do zero points in floats, norms, and
    biases of quantized layers that are not quantized themselves. Codes of weights, powers of two
    (MX), scales in fp8 and in super-blocks, scales that layers share, integer zero points and
    scales of activations stay. The same data gives the same result.

    Args:
        model: A model from ``ModelQuantizer.freeze``; it is changed in place. It may be read in
            parts, with the same result: each sequence of a step then reads it twice.
        original: The float model, which has the same inputs and outputs. It is not changed, and
            may be read in parts.
        batches: Data for the model; at least two sequences. The last ones are kept back: see
            ``split_kept_back``.
        options: Options; None for the default ones.
        journal: That of the ``ModelQuantizer`` which has quantized the model: a run that was killed
            goes on after its last measurement, to the same bits. None: the finish begins anew.

    Raises:
        ValueError: The model is not frozen, several processes run, nothing can train, there are
            fewer than two sequences, the model returns no logits, or the journal has not begun or
            holds a finish with other options or data.
    """
    options = options or DistillationOptions()
    _check(model, journal)
    trained = TrainedParameters(model)
    if not trained.parameters:
        raise ValueError("distill: the model has neither scales that may train, norms nor biases.")
    teaching, judging = split_kept_back(batches, options)
    files = None if journal is None else _open_files(journal, options, [*teaching, *judging])
    for network in (model, original):
        align_parameters(network)
    run = _Run(model, original, trained, options)
    with eval_mode(model), eval_mode(original):
        progress = _train(run, _begin(run, judging, files), teaching, judging, files)
    trained.restore(progress.state)
    if progress.best_step:
        trained.apply()
    change = progress.best - progress.first
    error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else None
    return Distillation(
        before=float(progress.first.mean()),
        after=float(progress.best.mean()),
        change_error=error,
        steps=progress.step,
        best=progress.best_step,
        scales=trained.count_scales(),
        zero_points=trained.count_zero_points(),
        norms=trained.count_norms(),
        biases=trained.count_biases(),
    )


def split_kept_back(
    batches: Iterable[Any], options: DistillationOptions | None = None
) -> tuple[list[Any], list[Any]]:
    """Return the sequences that train, and those that ``distill`` keeps back: the last ones.

    Quantize with the first alone: sequences that an algorithm has seen judge nothing.

    Args:
        batches: Data for the model.
        options: Options of the finish; None for the default ones.

    Raises:
        ValueError: There are fewer than two sequences.
    """
    sequences = list(split_sequences(batches))
    if len(sequences) < 2:
        raise ValueError(
            f"distill: {len(sequences)} sequences are too few. Give at least two: one to train "
            "with, one to decide when to stop."
        )
    kept = _count_kept_back(len(sequences), options or DistillationOptions())
    return sequences[:-kept], sequences[-kept:]


def plan_finish(sequences: int, parameters: int, options: DistillationOptions) -> Finish:
    """Return what a finish will do, at most.

    Args:
        sequences: Number of sequences of data.
        parameters: Number of values that train.
        options: Options of the finish.
    """
    measurements = 1 + math.ceil(options.steps / options.interval)
    judged = measurements * _count_kept_back(sequences, options)
    return Finish(sequences, options.steps * options.batch_size, judged, parameters)


def _count_kept_back(sequences: int, options: DistillationOptions) -> int:
    return min(sequences - 1, max(1, round(options.kept_back * sequences)))


def _open_files(
    journal: Journal, options: DistillationOptions, sequences: list[Any]
) -> FinishFiles:
    """Return the files of a finish in a journal."""
    request = {"options": asdict(options), "data": data_digest(sequences)}
    measured = [s for s in range(1, options.steps) if s % options.interval == 0]
    return FinishFiles(journal, request, [*measured, options.steps])


def _train(
    run: _Run,
    progress: Progress,
    teaching: list[Any],
    judging: list[Any],
    files: FinishFiles | None,
) -> Progress:
    """Train from some progress until nothing gets better; return the progress at the end."""
    options = run.options
    for step in show_progress(range(progress.step + 1, options.steps + 1), "distillation"):
        if progress.step - progress.best_step >= options.interval * options.patience:
            break
        if not run.train(teaching, step):
            logger.warning("distill: the loss of step %d is not finite; training stops.", step)
            return progress._replace(step=step)
        if step % options.interval and step != options.steps:
            continue
        with torch.no_grad():
            progress = progress.after(step, run.measure(judging), run.trained)
        if files is not None:
            files.write(progress, run.state())
    return progress


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a float model for ``distill``, made before the model is quantized.

    Raises:
        ValueError: The model is read in parts.
    """
    if residency_of(model) is not None:
        raise ValueError(
            "copy_of: the model is read in parts, so a copy would need all of its memory. Load the "
            "original a second time, in parts too."
        )
    return copy.deepcopy(model)


def _check(model: nn.Module, journal: Journal | None) -> None:
    layers = dict(quantized_layers(model))
    unfrozen = [name for name, layer in layers.items() if not layer.frozen]
    if not layers or unfrozen:
        raise ValueError(
            "distill: the model is not quantized and frozen. Call ModelQuantizer.quantize_model "
            "and ModelQuantizer.freeze first."
        )
    if processes().count > 1:
        raise ValueError("distill runs in one process. Call it in the first one alone.")
    if journal is not None and not journal.is_begun:
        raise ValueError(
            "distill: the journal does not know the model. Give the one that ModelQuantizer has "
            "quantized it with."
        )


def _begin(run: _Run, judging: list[Any], files: FinishFiles | None) -> Progress:
    """Return the progress that the files hold, or that before the first step."""
    found = None if files is None else files.read()
    if found is not None:
        progress, state = found
        run.restore(progress.step, state)
        return progress
    with torch.no_grad():
        first = run.measure(judging)
    return Progress(0, 0, first, first, run.trained.state())


class _Run:
    """Steps of training and measurements.

    Attributes:
        trained: The parameters that train.
        options: Options of the finish.
    """

    def __init__(
        self,
        model: nn.Module,
        original: nn.Module,
        trained: TrainedParameters,
        options: DistillationOptions,
    ) -> None:
        self._model, self._expected = model, OriginalPredictions(original)
        self._student = TrainedModel(model, trained)
        self.trained, self.options = trained, options
        rate = options.learning_rate
        self._optimizer = torch.optim.Adam(trained.parameters.values(), lr=rate)

    def state(self) -> State:
        """Return parameters, and what Adam keeps of their gradients, by name."""
        parameters, kept = self.trained.parameters, self._optimizer.state
        return {
            "parameter": {name: p.detach() for name, p in parameters.items()},
            "mean": {name: kept[p]["exp_avg"] for name, p in parameters.items()},
            "square": {name: kept[p]["exp_avg_sq"] for name, p in parameters.items()},
        }

    def restore(self, step: int, state: State) -> None:
        """Set what ``state`` has returned after a step."""
        self.trained.restore(state["parameter"])
        for name, parameter in self.trained.parameters.items():
            moments = {"exp_avg": state["mean"][name], "exp_avg_sq": state["square"][name]}
            moved = {key: value.to(parameter.device) for key, value in moments.items()}
            count = torch.tensor(float(step), dtype=torch.float32, device="cpu")
            self._optimizer.state[parameter] = {"step": count, **moved}

    def train(self, sequences: list[Any], step: int) -> bool:
        """Train on the next sequences; return whether the loss was finite."""
        options, parameters = self.options, list(self.trained.parameters.values())
        size = options.batch_size
        chosen = [sequences[(size * (step - 1) + i) % len(sequences)] for i in range(size)]
        total = [torch.zeros_like(p) for p in parameters]
        for sequence in chosen:
            target = self._target(sequence)
            with torch.enable_grad():
                found = logits_of(self._student.run(sequence))
                loss = distillation_loss(found, target, mask=_mask(sequence, found))
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if not bool(loss.isfinite()):
                return False
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient / size
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        cosine = math.cos(math.pi * (step - 1) / options.steps)
        self._optimizer.param_groups[0]["lr"] = options.learning_rate * (1 + cosine) / 2
        self._optimizer.step()
        return True

    def _target(self, sequence: Any) -> torch.Tensor:
        """Return the logits of the original. It and the model take turns in memory."""
        if not self._expected.keeps(sequence):
            release(self._model)
        return self._expected.of(sequence)

    def measure(self, sequences: list[Any]) -> torch.Tensor:
        """Return the mean divergence of each sequence, (sequences,) float64."""
        means = []
        for sequence in sequences:
            pair = self._target(sequence), logits_of(self._student.run(sequence))
            kl = kl_divergence(*(x.float().log_softmax(-1) for x in pair))
            mask = _mask(sequence, pair[0])
            means.append((kl if mask is None else kl[mask.cpu()]).mean())
        return torch.stack(means)


def _mask(sequence: Any, logits: torch.Tensor) -> torch.Tensor | None:
    """Return which positions count, in the shape of the logits without classes; None for all."""
    mask = padding_mask(sequence)
    if mask is None or mask.shape != logits.shape[:-1]:
        return None
    return mask.to(logits.device)
