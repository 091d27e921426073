"""Ranges that follow their tensors while a model trains, and how checkpoints of training keep them.

The scale of a weight is computed again from the weight at each step. The range of an activation
moves towards the range of each tensor that passes::

    average = average + averaging_constant * (range of the tensor - average)
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from quark.torch.numerics.scales import (
    block_range,
    qparams_from_range,
    represented_range,
    tensor_scale_from_range,
)
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.typed_buffers import TypedBuffers
from quark.torch.quantization.observer.observer import MinMaxObserver, ObserverBase

AVERAGING_CONSTANT = 0.01

Q = TypeVar("Q", bound="FollowingRange")


def is_recomputing() -> bool:
    """Whether gradients are being computed: then checkpointed activations run a second time."""
    # -1 outside of the backward pass. PyTorch has no public function for it.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class FollowingRange(TypedBuffers):
    """A quantizer as far as its range follows the tensor in training mode.

    Ranges follow after ``model.train()``. A model that is in training mode when it is quantized is
    only calibrated until then, and stays as it is.

    The averages are no buffers, so the buffers of a model stay the same while it trains. They are
    in its ``state_dict`` nevertheless.

    Attributes:
        range_lo: Average of the smallest values of an activation, float32; None before training.
        range_hi: Average of the largest values, likewise.
        is_fixed: Whether the range stays as it is, in training mode too.
        is_derived: Whether the scale is derived from those of other tensors, so that it never
            follows its own.
        last_update: Number of updates after which the range of an activation stays as it is; None
            for no limit.
        averaging_constant: Weight of a new tensor in the averages.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    scale_2: torch.Tensor | None
    zero_point_2: torch.Tensor | None

    def __init__(self, spec: QuantizationSpec, observer: ObserverBase) -> None:
        super().__init__()
        self._was_set_to_train = False
        self.spec = spec
        self.scheme = spec.scheme
        self.observer = observer
        self.range_lo: torch.Tensor | None = None
        self.range_hi: torch.Tensor | None = None
        # A tensor: torch.compile traces a model again for each value of a number of a module.
        self._count: torch.Tensor | None = None
        self.is_fixed = self.is_derived = False
        self.last_update: int | None = None
        self.averaging_constant = AVERAGING_CONSTANT

    @property
    def is_following(self) -> bool:
        """Whether the range follows tensors."""
        follows = not (self.is_fixed or self.is_derived)
        return self.training and self._was_set_to_train and follows

    @property
    def updates(self) -> int:
        """Number of tensors that the range has followed."""
        return 0 if self._count is None else int(self._count)

    @updates.setter
    def updates(self, number: int) -> None:
        self._count = torch.tensor(number, device="cpu") if number else None

    @property
    def has_updates(self) -> bool:
        """Whether the range has followed a tensor."""
        return self._count is not None

    def _count_update(self, moves: torch.Tensor | bool = True) -> None:
        self._count = (
            torch.tensor(0, device="cpu") if self._count is None else self._count
        ) + moves

    def train(self: Q, mode: bool = True) -> Q:
        """Set training mode, in which the range follows tensors, or evaluation mode."""
        self._was_set_to_train = mode
        return super().train(mode)

    def fix(self) -> None:
        """Let the range stay as it is; a checkpoint of training keeps this."""
        self.is_fixed = True
        self.updates = max(1, self.updates)
        self.requires_grad_(False)

    def end_training(self) -> None:
        """Let the range stay as it is, and forget the state of training."""
        self.fix()
        self.updates, self.range_lo, self.range_hi = 0, None, None

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are computed for each tensor that passes."""
        return bool(self.spec.is_dynamic) and self.scheme.fmt.scaled

    @property
    def needs_data(self) -> bool:
        """Whether the quantizer needs scales from observed statistics before it can quantize."""
        return self.spec.needs_data

    def compute_scales(self, x: torch.Tensor | None = None, is_finite: bool = False) -> None:
        """Compute the scales from the observed statistics."""
        raise NotImplementedError

    def follow(self, x: torch.Tensor) -> None:
        """Let the range follow a tensor that passes, in training mode.

        The scale of a weight that has trained is computed from the weight in evaluation mode too:
        the last step of the optimizer came after the last scale.
        """
        if not self.needs_data:
            return
        if self.spec.is_parameter:
            if self.is_following:
                self._count_update()
            if self.has_updates:
                self.observer(x)
                self.compute_scales(x, is_finite=True)
                self.observer.reset()
        elif self.is_following and self._has_scale() and self.last_update != 0:
            self._set_range(*self._move_range(*self._range_of(x), self._represented_range()))

    def _has_scale(self) -> bool:
        return (self.scale_2 if self.is_dynamic else self.scale) is not None

    def _range_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range that the observer gives a tensor."""
        if isinstance(self.observer, MinMaxObserver):
            return block_range(x, self.observer.scheme)
        self.observer.reset()
        try:
            self.observer(x)
            return represented_range(*self.observer.calculate_qparams(), self.scheme)
        except FloatingPointError:
            nan = torch.full_like(self._represented_range()[0], torch.nan)
            return nan, nan

    def _represented_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range that the present scales were computed from."""
        if self.is_dynamic and self.scale_2 is not None:
            return represented_range(self.scale_2, None, self.scheme, of_tensor_scale=True)
        return represented_range(self.scale, self.zero_point, self.scheme)

    def _set_range(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        """Compute the scales of an activation from its range, in place."""
        if self.scheme.scale.two_level:
            self._put("scale_2", tensor_scale_from_range(lo, hi, self.scheme))
        if not self.is_dynamic:
            how, largest = self.observer.scheme, self.observer.largest
            scale, zero_point = qparams_from_range(lo, hi, how, None, largest)
            self._put("scale", scale)
            self._put("zero_point", zero_point)

    def _put(self, name: str, value: torch.Tensor | None) -> None:
        buffer = getattr(self, name)
        if value is None or buffer is None:
            setattr(self, name, value)
        else:
            buffer.copy_(value)

    def _move_range(
        self, lo: torch.Tensor, hi: torch.Tensor, start: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the averages towards the range of a tensor, and return them.

        Args:
            lo: Smallest values of the tensor. Values that are not finite change nothing, and so
                do all after ``last_update``.
            hi: Largest values, likewise.
            start: Range before the first tensor.
        """
        first = start if self.range_lo is None or self.range_hi is None else None
        old_lo, old_hi = first or (self.range_lo, self.range_hi)
        usable = torch.isfinite(lo) & torch.isfinite(hi)
        moves: torch.Tensor | bool = True
        if self.last_update is not None and self._count is not None:
            moves = self._count < self.last_update
            usable = usable & moves.to(usable.device)
        averages = []
        for old, new in ((old_lo, lo), (old_hi, hi)):
            assert old is not None
            old = old.float().to(new.device)
            # lerp computes new - old, which may overflow: for -3e38 and 3e38. Halves do not.
            moved = torch.lerp(old / 2, new.float() / 2, self.averaging_constant) * 2
            averages.append(torch.where(usable, moved, old))
        self.range_lo, self.range_hi = averages
        self._count_update(moves)
        return averages[0], averages[1]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.has_updates:
            destination[prefix + "range_updates"] = torch.tensor(
                [self.updates, self.is_fixed], device="cpu"
            )
        for name in ("range_lo", "range_hi"):
            value = getattr(self, name)
            if value is not None:
                destination[prefix + name] = value

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load tensors, also those that this module has none of yet, such as scales.

        A state without averages is one from before training.
        """
        device = next((t.device for t in [*self.buffers(), *self.parameters()]), None)
        for name, buffer in self._buffers.items():
            if buffer is None and prefix + name in state_dict:
                self._buffers[name] = torch.empty_like(state_dict[prefix + name], device=device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self.updates = 0
        own = ("range_updates", "range_lo", "range_hi")
        counts, *averages = (state_dict.get(prefix + name) for name in own)
        if counts is not None:
            self.updates, self.is_fixed = int(counts[0]), bool(counts[1])
            self.requires_grad_(not self.is_fixed)
        self.range_lo, self.range_hi = (
            None if t is None else t.detach().to(device or t.device, copy=True) for t in averages
        )
        unexpected_keys[:] = [k for k in unexpected_keys if k not in {prefix + n for n in own}]
