"""A finish behind quantization: scales and norms train against the predictions of the float model.

Codes stay. A weight is linear in its scales once the codes are fixed, so a scale s trains as the
ratio r = s' / s: the weight is W r. Source: quantization-aware distillation (arXiv 2601.20088) for
the loss, EfficientQAT (arXiv 2407.11062, section 3.3) for training scales under fixed codes. Text
that is kept back decides which step is the best, and whether one is better than none.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.graph.residency import residency_of
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.stages import per_value
from quark.torch.pipeline.batches import padding_mask, run_batch, show_progress, split_sequences
from quark.torch.pipeline.processes import processes
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor, TensorQuantizer
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.training import distillation_loss

logger = logging.getLogger("quark")


@dataclass(frozen=True)
class DistillationOptions:
    """Options of ``distill``.

    Attributes:
        steps: Largest number of steps.
        batch_size: Sequences of a step.
        learning_rate: Learning rate of Adam, for ratios of scales and for norms alike. It falls to
            zero along a half cosine.
        kept_back: Share of the sequences that do not train, but decide when to stop.
        interval: Steps between two measurements on the sequences that are kept back.
        patience: Measurements without a better one after which training stops.

    Raises:
        ValueError: A value is out of range.
    """

    steps: int = 100
    batch_size: int = 4
    learning_rate: float = 3e-3
    kept_back: float = 0.125
    interval: int = 10
    patience: int = 3

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "interval", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give a positive number.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}: give a positive number.")
        if not 0 < self.kept_back < 1:
            raise ValueError(f"kept_back={self.kept_back}: give a share between 0 and 1.")


@dataclass(frozen=True)
class Distillation:
    """Result of ``distill``.

    Attributes:
        before: Mean KL(float ‖ quantized) at a position of the sequences kept back, nats.
        after: Likewise, behind the best step; ``before`` if no step was better.
        change_error: Standard error of ``after - before``, paired over sequences; None of one.
        steps: Steps that ran.
        best: The step whose scales and norms the model has; 0 if none was better.
        scales: Number of scales that trained.
        norms: Number of parameters of norms that trained.
    """

    before: float
    after: float
    change_error: float | None
    steps: int
    best: int
    scales: int
    norms: int


def distill(
    model: nn.Module,
    original: nn.Module,
    batches: Iterable[Any],
    options: DistillationOptions | None = None,
) -> Distillation:
    """Train the scales and the norms of a frozen model against the predictions of the original.

    Scales train that may take any value and belong to one weight: those of integers and floats per
    channel or per group, and the tensor scale of NVFP4. Powers of two (MX), scales in fp8 and in
    super-blocks, scales that layers share, zero points and scales of activations stay. Codes of
    weights do not change. The same data gives the same result.

    Args:
        model: A model in memory from ``ModelQuantizer.freeze``; it is changed in place.
        original: The float model, which has the same inputs and outputs. It is not changed.
        batches: Data for the model; at least two sequences. The last ones are kept back.
        options: Options; None for the default ones.

    Raises:
        ValueError: The model is read in parts or not frozen, several processes run, nothing can
            train, there are fewer than two sequences, or the model returns no logits.
    """
    options = options or DistillationOptions()
    _check(model)
    trained = _Trained(model)
    if not trained.parameters:
        raise ValueError("distill: the model has neither scales that may train nor norms.")
    sequences = list(split_sequences(batches))
    if len(sequences) < 2:
        raise ValueError(
            f"distill: {len(sequences)} sequences are too few. Give at least two: one to train "
            "with, one to decide when to stop."
        )
    kept = min(len(sequences) - 1, max(1, round(options.kept_back * len(sequences))))
    teaching, judging = sequences[:-kept], sequences[-kept:]
    run = _Run(model, original.eval(), trained, options)
    with torch.no_grad():
        first = run.measure(judging)
    best, last, step = first, 0, 0
    state = trained.state()
    for step in show_progress(range(1, options.steps + 1), "distillation"):
        if not run.train(teaching, step):
            logger.warning("distill: the loss of step %d is not finite; training stops.", step)
            break
        if step % options.interval and step != options.steps:
            continue
        with torch.no_grad():
            figures = run.measure(judging)
        if figures.mean() < best.mean():
            best, last, state = figures, step, trained.state()
        elif step - last >= options.interval * options.patience:
            break
    trained.restore(state)
    if last:
        trained.apply()
    change = best - first
    error = float(change.std()) / math.sqrt(len(change)) if len(change) > 1 else None
    counts = trained.count_scales(), trained.count_norms()
    return Distillation(float(first.mean()), float(best.mean()), error, step, last, *counts)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a float model for ``distill``, made before the model is quantized.

    Raises:
        ValueError: The model is read in parts.
    """
    _check_in_memory(model)
    return copy.deepcopy(model)


def _check(model: nn.Module) -> None:
    _check_in_memory(model)
    layers = dict(quantized_layers(model))
    unfrozen = [name for name, layer in layers.items() if not layer.frozen]
    if not layers or unfrozen:
        raise ValueError(
            "distill: the model is not quantized and frozen. Call ModelQuantizer.quantize_model "
            "and ModelQuantizer.freeze first."
        )
    if processes().count > 1:
        raise ValueError("distill runs in one process. Call it in the first one alone.")


def _check_in_memory(model: nn.Module) -> None:
    if residency_of(model) is not None:
        raise ValueError(
            "distill: the model is read in parts, and gradients need all of it. Load it without "
            "max_memory, or leave the finish out."
        )


class _Trained:
    """The parameters that train, and the tensors of the model that they stand for.

    Attributes:
        parameters: Ratios of scales by the name of the layer, and norms by the name of the
            parameter; float32.
    """

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "quant_config", None)
        shares = isinstance(config, Config) and bool(config.shared_scale_groups)
        self._layers = {
            name: layer
            for name, layer in quantized_layers(model)
            if (q := layer.weight_quantizer) is not None and _part_of(q, shares) is not None
        }
        self._parts = {n: str(_part_of(_quantizer(x), shares)) for n, x in self._layers.items()}
        self._norms = dict(_norm_parameters(model))
        self._scales = {n: self._scale(n).detach().clone() for n in self._layers}
        made = {n: torch.ones_like(s, dtype=torch.float32) for n, s in self._scales.items()}
        made |= {n: p.detach().float().clone() for n, p in self._norms.items()}
        self.parameters = {n: value.requires_grad_() for n, value in made.items()}

    def _scale(self, name: str) -> torch.Tensor:
        scale: torch.Tensor = getattr(_quantizer(self._layers[name]), self._parts[name])
        return scale

    def values(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model that follow from the parameters, by their names."""
        values = {
            f"{name}.weight": self._weight(name, layer) for name, layer in self._layers.items()
        }
        return values | {n: self.parameters[n].to(p.dtype) for n, p in self._norms.items()}

    def _weight(self, name: str, layer: FakeQuantizedLayer) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._state(name).value(layer.weight.dtype)
        weight, scheme = layer.weight.detach(), _quantizer(layer).scheme
        ratio, old = self.parameters[name], self._scales[name].float()
        rounded = self._new_scale(name).float() / old
        ratio = ratio + (rounded - ratio).detach()  # straight-through gradient
        values: torch.Tensor = weight.float() * per_value(ratio, scheme, weight.shape)
        return values.to(weight.dtype)

    def _state(self, name: str) -> QuantizedTensor:
        """Return codes and new scales of a weight."""
        layer, new = self._layers[name], self._new_scale(name)
        state = layer.quantized_tensor("weight")
        assert state is not None and state.scale is not None
        if self._parts[name] == "scale":
            return state._replace(scale=new)
        # Block scales are relative to the tensor scale.
        blocks = state.scale * (new / self._scales[name])
        blocks = round_scale(blocks, state.scheme.scale, new)
        return state._replace(scale=blocks, scale_2=new)

    @torch.no_grad()
    def _new_scale(self, name: str) -> torch.Tensor:
        scale = self.parameters[name] * self._scales[name].float()
        if self._parts[name] == "scale_2":
            return scale
        return round_scale(scale, _quantizer(self._layers[name]).scheme.scale)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace scales, weights and norms of the model. Codes stay."""
        for name, layer in self._layers.items():
            state, quantizer = self._state(name), _quantizer(layer)
            layer.weight.data.copy_(state.value(layer.weight.dtype))
            quantizer.scale, quantizer.scale_2 = state.scale, state.scale_2
        for name, parameter in self._norms.items():
            parameter.data.copy_(self.parameters[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the parameters."""
        return {name: value.detach().clone() for name, value in self.parameters.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the parameters to a copy of them."""
        for name, value in self.parameters.items():
            value.copy_(state[name])

    def count_scales(self) -> int:
        """Return the number of scales that train."""
        return sum(scale.numel() for scale in self._scales.values())

    def count_norms(self) -> int:
        """Return the number of parameters of norms."""
        return sum(parameter.numel() for parameter in self._norms.values())


def _quantizer(layer: FakeQuantizedLayer) -> TensorQuantizer:
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    return quantizer


def _part_of(quantizer: TensorQuantizer, shares: bool) -> str | None:
    """Return the scale of a weight that may train: ``scale`` or ``scale_2``; None if none may.

    Args:
        quantizer: The quantizer of the weight.
        shares: Whether layers share scales of whole weights.
    """
    part = "scale_2" if quantizer.scheme.scale.two_level else "scale"
    scale = getattr(quantizer, part)
    if scale is None or (part == "scale" and not _is_free(quantizer.scheme)):
        return None
    return None if shares and scale.numel() == 1 else part


def _is_free(scheme: Scheme) -> bool:
    """Whether scales may take any value of a wide float type."""
    scale = scheme.scale
    is_wide = scale.fmt is None and not scale.span and not scale.power_of_two
    return scheme.fmt.scaled and is_wide and not scheme.shares_exponents


def _norm_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the float vectors of norms: parameters of modules whose class is a norm."""
    for path, module in model.named_modules():
        if "norm" not in type(module).__name__.lower():
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point() and parameter.dim() == 1:
                yield name, parameter


class _Bound(nn.Module):
    """A model some of whose tensors are replaced."""

    def __init__(self, model: nn.Module, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self._values = model, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the replaced tensors."""
        return functional_call(self.model, self._values, args, kwargs)


class _Run:
    """Steps of training and measurements."""

    def __init__(
        self, model: nn.Module, original: nn.Module, trained: _Trained, options: DistillationOptions
    ) -> None:
        self._model, self._original = model, original
        self._trained, self._options = trained, options
        rate = options.learning_rate
        self._optimizer = torch.optim.Adam(trained.parameters.values(), lr=rate)

    def train(self, sequences: list[Any], step: int) -> bool:
        """Train on the next sequences; return whether the loss was finite."""
        options, parameters = self._options, list(self._trained.parameters.values())
        size = options.batch_size
        chosen = [sequences[(size * (step - 1) + i) % len(sequences)] for i in range(size)]
        total = [torch.zeros_like(p) for p in parameters]
        for sequence in chosen:
            with torch.no_grad():
                target = _logits(run_batch(self._original, sequence))
            with torch.enable_grad():
                student = _Bound(self._model, self._trained.values())
                found = _logits(run_batch(student, sequence))
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

    def measure(self, sequences: list[Any]) -> torch.Tensor:
        """Return the mean divergence of each sequence, (sequences,) float64."""
        student = _Bound(self._model, self._trained.values())
        means = []
        for sequence in sequences:
            pair = [_logits(run_batch(m, sequence)) for m in (self._original, student)]
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


def _logits(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"distill: the model returns {type(output).__name__} without logits, which are "
            "compared. Leave the finish out."
        )
    return logits
