"""SpinQuant (Liu et al. 2024): rotations learned through the quantized model.

Cayley SGD (Li et al. 2020, "Efficient Riemannian optimization on the Stiefel manifold via the
Cayley transform", algorithm 1) moves orthogonal matrices along their manifold.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from quark.torch.algorithm.rotation.edits import STREAM, Turns
from quark.torch.graph.eval_mode import at_inference
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.pipeline.batches import padding_mask, parts, progress, run_batch
from quark.torch.pipeline.context import Context
from quark.torch.quantization.nn.quantizer import TensorQuantizer

logger = logging.getLogger(__name__)

STEPS = 100
RATE = 0.5
JUDGED = 8  # parts of the data on which rotations are compared
_Rotations = dict[str, torch.Tensor]


def cayley_step(
    rotation: torch.Tensor, gradient: torch.Tensor, rate: float, keeps_ones: bool = False
) -> torch.Tensor:
    """Move an orthogonal matrix against a gradient, along the orthogonal matrices.

    The direction is the skew part of the gradient seen from the matrix; its Cayley transform is
    orthogonal for every step. Steps are measured by its 1-norm, whose inverse is the longest one in
    the paper, so that they suit models of every width and loss.

    Args:
        rotation: (n, n) orthogonal.
        gradient: (n, n) of a loss with respect to it.
        rate: Length of the step as a part of the longest, 0 to 1.
        keeps_ones: Whether the sums of rows and columns must stay what they are.

    Returns:
        (n, n) orthogonal.
    """
    inner = gradient @ rotation.T
    skew = inner.T - inner  # descends; the symmetric part leaves the manifold
    if keeps_ones:
        skew = skew - skew.mean(0) - skew.mean(1, keepdim=True)  # the mean of all is zero
    bound = float(skew.abs().sum(0).max())
    if bound == 0:
        return rotation
    half = skew * (rate / bound / 2)
    one = torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)
    moved: torch.Tensor = torch.linalg.solve(one - half, rotation + half @ rotation)
    return moved


def learn(
    context: Context, turns: Turns, rotations: Mapping[str, torch.Tensor], keeps_ones: bool
) -> _Rotations:
    """Return rotations under which the quantized model is nearer to the float model.

    The loss is the divergence of the predictions of tokens. Weights and activations are quantized
    with ranges of their own, gradients pass straight through. Blocks run again for their gradients,
    so that memory holds the graph of one at a time.

    Args:
        context: The model. It is unchanged in the end.
        turns: How rotations enter its parameters.
        rotations: Where to start, by name.
        keeps_ones: Whether the rotation of the residual stream must keep the vector of ones.

    Returns:
        The best rotations met, float64: never worse on the data than those of the start.

    Raises:
        ValueError: There is no data, or the loss is not finite.
    """
    data = list(parts(context.batches))
    if not data:
        raise ValueError("rotation: trainable=True needs calibration data.")
    device = next(context.model.parameters()).device
    current = {name: _orthogonal(r).to(device) for name, r in rotations.items()}
    judged = data[:JUDGED]
    best = dict(current)
    with at_inference(context.model), _Turned(context, turns) as turned:
        start = lowest = turned.mean_loss(judged, current)
        for step, batch in enumerate(progress(list(islice(cycle(data), STEPS)), "rotations")):
            rate = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
            gradients = turned.gradients(batch, current)
            for name, gradient in gradients.items():
                ones = keeps_ones and name == STREAM
                current[name] = cayley_step(current[name], gradient, rate, ones)
            if (step + 1) % (STEPS // 5) == 0:
                loss = turned.mean_loss(judged, current)
                if loss < lowest:
                    lowest, best = loss, dict(current)
    logger.info("rotation: divergence %.5f with the first rotations, %.5f learned.", start, lowest)
    return best


def _orthogonal(rotation: torch.Tensor) -> torch.Tensor:
    scale = 1.0 if rotation.is_floating_point() else len(rotation) ** -0.5
    return rotation.double() * scale


class _Turned:
    """A model that computes with rotated, quantized parameters while this context lasts."""

    def __init__(self, context: Context, turns: Turns) -> None:
        self.context, self.turns = context, turns
        self.model = context.model
        self.rotations: _Rotations | None = None
        self._output: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> _Turned:
        names = self.turns.names()
        for block in self.context.structure.blocks:
            module = self.model.get_submodule(block)
            inner = [name for name in names if name.startswith(f"{block}.")]
            names = [name for name in names if name not in inner]
            self._replace(module, f"{block}.", inner, is_repeated=True)
        self._replace(self.model, "", names, is_repeated=False)
        for module in self.model.modules():
            if isinstance(module, TensorQuantizer):
                self._stack.callback(module.register_forward_hook(self._quantize).remove)
        self._stack.callback(self.model.register_forward_hook(self._keep).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _replace(self, module: nn.Module, prefix: str, names: list[str], is_repeated: bool) -> None:
        """Let a module run with parameters that are computed from the rotations."""
        carrier = _Carrier(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.rotations is None:
                return carrier(*args, **kwargs)
            values = {}
            for name in names:
                parameter = self.model.get_parameter(name)
                value = self.turns.value(parameter, name, self.rotations, torch.float32)
                values[f"module.{name.removeprefix(prefix)}"] = value.to(parameter.dtype)
            return functional_call(carrier, values, args, kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_repeated and torch.is_grad_enabled():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return run(*args, **kwargs)

        kept = vars(module).get("forward")
        module.forward = forward
        self._stack.callback(_put_back, module, kept)

    def _quantize(self, module: nn.Module, args: tuple[torch.Tensor], output: Any) -> Any:
        assert isinstance(module, TensorQuantizer)
        x, scheme = args[0], module.scheme
        if self.rotations is None or not x.numel():
            return output
        scale, zero_point = dynamic_qparams(x, scheme) if scheme.fmt.scaled else (None, None)
        return fake_quantize(x, scale, zero_point, scheme)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output

    def _logits(self, batch: Any, rotations: _Rotations | None) -> torch.Tensor:
        self.rotations = rotations
        run_batch(self.model, batch)
        output, self._output = self._output, None
        logits: torch.Tensor = getattr(output, "logits", output)
        mask = padding_mask(batch)
        return (logits.flatten(0, -2) if mask is None else logits[mask.to(logits.device)]).float()

    def loss(self, batch: Any, rotations: _Rotations) -> torch.Tensor:
        """Return the mean divergence of predictions from those of the float model."""
        with torch.no_grad():
            target = self._logits(batch, None).log_softmax(-1)
        found = self._logits(batch, rotations).log_softmax(-1)
        return F.kl_div(found, target, reduction="batchmean", log_target=True)

    @torch.no_grad()
    def mean_loss(self, data: list[Any], rotations: _Rotations) -> float:
        """Return the mean of the losses of some parts of the data."""
        loss = sum(float(self.loss(batch, rotations)) for batch in data) / len(data)
        if not math.isfinite(loss):
            raise ValueError("rotation: the loss is not finite. Use a wider type than the model's.")
        return loss

    def gradients(self, batch: Any, rotations: _Rotations) -> _Rotations:
        """Return the gradient of the loss by each rotation."""
        leaves = {name: r.clone().requires_grad_() for name, r in rotations.items()}
        with torch.enable_grad():
            loss = self.loss(batch, leaves)
            found = torch.autograd.grad(loss, list(leaves.values()))
        return dict(zip(leaves, found, strict=True))


class _Carrier(nn.Module):
    """Calls the forward that a module has now, whatever takes its place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.call(*args, **kwargs)


def _put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del module.forward
    else:
        module.forward = forward
