"""SpinQuant (Liu et al. 2024, section 3.2): rotations learned through the quantized model.

Cayley SGD (Li et al. 2020, "Efficient Riemannian optimization on the Stiefel manifold via the
Cayley transform", algorithm 1) moves orthogonal matrices along their manifold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from quark.torch.algorithm.rotation.weight_edits import STREAM, RotationEdits
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.float_products import float_products
from quark.torch.graph.replay import replace_forwards
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.pipeline.batches import flatten_batches, padding_mask, run_batch, show_progress
from quark.torch.pipeline.context import Context
from quark.torch.quantization.nn.quantizer import TensorQuantizer

logger = logging.getLogger(__name__)

STEPS = 100
RATE = 0.5
FACTOR_RATE = 0.3  # longest step of the logarithms of factors, in units of that of rotations
EVALUATION_BATCHES = 8  # batches on which rotations are compared
_Rotations = dict[str, torch.Tensor]


def cayley_step(
    rotation: torch.Tensor, gradient: torch.Tensor, rate: float, preserves_ones: bool = False
) -> torch.Tensor:
    """Move an orthogonal matrix against a gradient, along the orthogonal matrices.

    The direction is the skew part A of the gradient seen from the matrix R. The step of length t
    is (I - t/2 A)⁻¹ (I + t/2 A) R, which is orthogonal for every t. Lengths are relative to the
    inverse 1-norm of A, the longest step in the paper, so that they suit every width and loss.

    Args:
        rotation: R, (n, n) orthogonal.
        gradient: (n, n): gradient of a loss with respect to R.
        rate: Length of the step relative to the longest, 0 to 1.
        preserves_ones: Whether the sums of rows and columns must stay the same.

    Returns:
        (n, n) orthogonal.
    """
    # A = R Gᵀ - G Rᵀ is skew, and R + t A R descends: its derivative of the loss is
    # tr(Gᵀ A R) = -|A|²/2. The symmetric part of G Rᵀ would leave the orthogonal matrices.
    # Example: R = I, G = [[0, -1], [0, 0]] -> A = [[0, 1], [-1, 0]]: entry (0, 1) of R grows, whose
    # gradient is negative, and entry (1, 0) decreases with it.
    inner = gradient @ rotation.T
    skew = inner.T - inner
    if preserves_ones:
        skew = skew - skew.mean(0) - skew.mean(1, keepdim=True)  # A 1 = 0; the total mean is 0
    bound = float(skew.abs().sum(0).max())
    if bound == 0:
        return rotation
    half = skew * (rate / bound / 2)
    identity = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
    moved: torch.Tensor = torch.linalg.solve(identity - half, rotation + half @ rotation)
    return moved


def learn_rotations(
    context: Context,
    edits: RotationEdits,
    rotations: Mapping[str, torch.Tensor],
    preserves_ones: bool,
) -> _Rotations:
    """Return rotations under which the quantized model is closer to the float model.

    The loss is the KL divergence of the predictions, per token. Weights and activations are
    quantized with dynamic ranges, and gradients pass straight through. Each block runs a second
    time for its gradients, so memory holds the graph of one block at a time.

    Args:
        context: The model. It is unchanged afterwards.
        edits: The edits of its parameters, in which the rotations are named.
        rotations: The initial rotations by name, and initial logarithms of factors (size,).
        preserves_ones: Whether the rotation of the residual stream must preserve the vector of
            ones.

    Returns:
        The best rotations, float64. On the data they are never worse than the initial ones.

    Raises:
        ValueError: There is no data, or the loss is not finite.
    """
    data = list(flatten_batches(context.batches))
    if not data:
        raise ValueError("rotation: trainable=True needs calibration data.")
    device = next(context.model.parameters()).device
    current = {name: _orthogonal(r).to(device) for name, r in rotations.items()}
    evaluated = data[:EVALUATION_BATCHES]
    best = dict(current)
    with eval_mode(context.model), _RotatedModel(context, edits) as model:
        start = lowest = model.mean_loss(evaluated, current)
        for step, batch in enumerate(show_progress(list(islice(cycle(data), STEPS)), "rotations")):
            rate = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
            gradients = model.gradients(batch, current)
            for name, gradient in gradients.items():
                if gradient.dim() == 1:
                    largest = gradient.abs().max().clamp(min=torch.finfo(gradient.dtype).tiny)
                    current[name] = current[name] - FACTOR_RATE * rate * gradient / largest
                    continue
                ones = preserves_ones and name == STREAM
                current[name] = cayley_step(current[name], gradient, rate, ones)
            if (step + 1) % (STEPS // 5) == 0:
                candidates = _candidates(current)
                losses = [model.mean_loss(evaluated, candidate) for candidate in candidates]
                current = candidates[losses.index(min(losses))]
                if min(losses) < lowest:
                    lowest, best = min(losses), dict(current)
    logger.info("rotation: divergence %.5f with initial rotations, %.5f learned.", start, lowest)
    return best


def _candidates(current: _Rotations) -> list[_Rotations]:
    """Return rotations with their factors, and without: few help where R1 spreads outliers."""
    if all(r.dim() > 1 for r in current.values()):
        return [current]
    plain = {n: r if r.dim() > 1 else torch.zeros_like(r) for n, r in current.items()}
    return [dict(current), plain]


def _orthogonal(rotation: torch.Tensor) -> torch.Tensor:
    if rotation.dim() == 1:  # logarithms of factors
        return rotation.double()
    scale = 1.0 if rotation.is_floating_point() else len(rotation) ** -0.5
    return rotation.double() * scale


class _RotatedModel:
    """A model that computes with rotated, quantized parameters inside this context.

    Args:
        context: The model.
        edits: The edits of its parameters.

    Attributes:
        rotations: Rotations by name, or None to compute as the float model.
    """

    def __init__(self, context: Context, edits: RotationEdits) -> None:
        self.context, self.edits = context, edits
        self.model = context.model
        self.rotations: _Rotations | None = None
        self._output: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> _RotatedModel:
        names = self.edits.names()
        for block in self.context.structure.blocks:
            inner = [name for name in names if name.startswith(f"{block}.")]
            names = [name for name in names if name not in inner]
            self._replace_forward(block, inner, recomputes=True)
        self._replace_forward("", names, recomputes=False)
        for module in self.model.modules():
            if isinstance(module, TensorQuantizer):
                self._stack.callback(module.register_forward_hook(self._quantize).remove)
        self._stack.callback(self.model.register_forward_hook(self._keep_output).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _replace_forward(self, path: str, names: list[str], recomputes: bool) -> None:
        """Let a module run with parameters that are computed from the rotations.

        Args:
            path: Name of the module, empty for the model.
            names: Full names of the parameters.
            recomputes: Whether the module runs again for its gradients.
        """
        module = self.model.get_submodule(path)
        prefix = f"{path}." if path else ""
        original = _OriginalForward(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.rotations is None:
                return original(*args, **kwargs)
            values = {}
            for name in names:
                parameter = self.model.get_parameter(name)
                value = self.edits.value(parameter, name, self.rotations, torch.float32)
                values[f"module.{name.removeprefix(prefix)}"] = value.to(parameter.dtype)
            return functional_call(original, values, args, kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if recomputes and torch.is_grad_enabled():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return run(*args, **kwargs)

        self._stack.enter_context(replace_forwards(self.model, {path: forward}))

    def _quantize(self, module: nn.Module, args: tuple[torch.Tensor], output: Any) -> Any:
        assert isinstance(module, TensorQuantizer)
        x, scheme = args[0], module.scheme
        if self.rotations is None or not x.numel():
            return output
        scale, zero_point = dynamic_qparams(x, scheme) if scheme.fmt.scaled else (None, None)
        return fake_quantize(x, scale, zero_point, scheme)

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output

    def _logits(self, batch: Any, rotations: _Rotations | None) -> torch.Tensor:
        self.rotations = rotations
        run_batch(self.model, batch)
        output, self._output = self._output, None
        logits: torch.Tensor = getattr(output, "logits", output)
        mask = padding_mask(batch)
        return (logits.flatten(0, -2) if mask is None else logits[mask.to(logits.device)]).float()

    def loss(self, batch: Any, rotations: _Rotations) -> torch.Tensor:
        """Return the mean divergence of the predictions from those of the float model."""
        with torch.no_grad():
            target = self._logits(batch, None).log_softmax(-1)
        predictions = self._logits(batch, rotations).log_softmax(-1)
        return F.kl_div(predictions, target, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def mean_loss(self, data: list[Any], rotations: _Rotations) -> float:
        """Return the mean of the losses of several batches."""
        loss = sum(float(self.loss(batch, rotations)) for batch in data) / len(data)
        if not math.isfinite(loss):
            raise ValueError(
                "rotation: the loss is not finite. Load the model in a wider type, such as float32."
            )
        return loss

    def gradients(self, batch: Any, rotations: _Rotations) -> _Rotations:
        """Return the gradient of the loss with respect to each rotation."""
        leaves = {name: r.clone().requires_grad_() for name, r in rotations.items()}
        with float_products(), torch.enable_grad():  # blocks may run again for the gradient
            loss = self.loss(batch, leaves)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        return dict(zip(leaves, gradients, strict=True))


class _OriginalForward(nn.Module):
    """Calls the forward that a module has at construction, after it is replaced too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.call(*args, **kwargs)
