"""Buffers that keep their type when a model is converted to another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class TypedBuffers(nn.Module):
    """A module whose buffers move to other devices, but keep their type (``half()``).

    Scales, zero points and rotations belong to codes. Rounded to the type of a model they would
    give other values: 16 bits cannot hold every scale, and float16 not its range.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert or move the module."""
        kept = {name: x for name, x in self._buffers.items() if x is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        return self
