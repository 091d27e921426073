"""The observer of weights whose scales are in super-blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from quark.torch.numerics.qdq import CHUNK, QParams
from quark.torch.numerics.scale_formats import FLOAT32
from quark.torch.numerics.scales import qparams_from_range
from quark.torch.numerics.super_block_fit import fit
from quark.torch.quantization.observer.scale_search import SearchObserver


class SuperBlockObserver(SearchObserver):
    """Fits the scales and minima of super-blocks; see ``numerics.super_block_fit``."""

    def search(self, rows: torch.Tensor, shape: Sequence[int]) -> QParams:
        """Return the scales and zero points of least squared error.

        Args:
            rows: Values, (blocks, elements).
            shape: Shape of the scales.
        """
        axis, span = self.scheme.axis % len(shape), self.scheme.scale.span
        blocks = rows.reshape(*shape, -1).movedim(axis, -2)  # (…, blocks, elements)
        whole = F.pad(blocks, (0, 0, 0, -shape[axis] % span))  # zeros fill the last super-block
        groups = whole.reshape(-1, span, rows.shape[1])
        free = replace(self.scheme, scale=FLOAT32)
        parts = []
        for piece in torch.split(groups, max(1, CHUNK // groups[0].numel())):
            values = piece.float()
            start = qparams_from_range(values.amin(-1), values.amax(-1), free, None, self.largest)
            parts.append(fit(values, start, self.scheme))
        scale, zero_point = (
            torch.cat(part).reshape(whole.shape[:-1])[..., : shape[axis]].movedim(-1, axis)
            for part in zip(*parts, strict=True)
        )
        return scale.contiguous(), zero_point.contiguous()
