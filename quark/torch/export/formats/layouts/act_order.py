"""Act order of GPTQ: inputs are grouped by importance, not by position.

A checkpoint stores codes in the order of the inputs, and the group of each input beside them. The
unpacked ``QuantizedTensor`` has codes in the order of the groups, so that each group is
contiguous, and ``order``, the input of each column. Example of six inputs in groups of two::

    stored groups   g_idx   [2, 0, 1, 0, 2, 1]
    order                   [1, 3, 2, 5, 0, 4]   inputs of group 0, then of 1, then of 2

Column j of the unpacked codes is column order[j] of the stored codes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import GROUPS
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout

ACT_ORDER_PROBLEM = "its inputs are grouped in another order than they come in (act order)"


def has_act_order(layer: QuantizedLayer) -> bool:
    """Whether a layer stores the group of each input."""
    return isinstance(layer, PackedLayer) and layer.weight_groups is not None


def is_in_order(groups: torch.Tensor, sizes: Iterable[int], where: str) -> bool:
    """Whether inputs are in the order of their groups.

    Args:
        groups: Group of each input, (inputs,).
        sizes: Group sizes of the configuration, -1 for all inputs.
        where: Name of the tensor, for messages.

    Raises:
        ValueError: The groups have none of these sizes.
    """
    groups = groups.flatten().long()
    inputs = torch.arange(len(groups), device="cpu")
    in_order = [inputs // (size if size > 0 else max(len(groups), 1)) for size in sizes]
    if any(groups.equal(expected) for expected in in_order):
        return True
    if not any(groups.sort().values.equal(expected) for expected in in_order):
        raise ValueError(
            f"{where}: inputs are not in groups of {' or '.join(map(str, sorted(sizes)))} each "
            "(group_size), whatever their order (act order)."
        )
    return False


class ActOrderLayout(TensorLayout):
    """A layout with one more part: the group of each input of weights per group.

    Args:
        layout: Layout of codes, scales and zero points.
    """

    def __init__(self, layout: TensorLayout) -> None:
        self.layout = layout

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of each part."""
        stored = self.layout.declare(spec, shape, is_stored)
        if is_stored and spec.scheme.has_zero_point and spec.scheme.group > 0:
            stored[GROUPS] = (shape[1],), torch.int32
        return stored

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored parts, codes in the order of the inputs."""
        if state.order is None:
            return self.layout.pack(state, value)
        assert state.codes is not None
        codes = torch.empty_like(state.codes).index_copy_(1, state.order, state.codes)
        sorted_groups = torch.arange(len(state.order), device=codes.device) // state.scheme.group
        groups = torch.empty_like(sorted_groups).index_copy_(0, state.order, sorted_groups)
        stored = self.layout.pack(state._replace(codes=codes, order=None), value)
        return {**stored, GROUPS: groups.int()}

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return the unpacked tensor, codes in the order of the groups."""
        state = self.layout.unpack(spec, shape, stored)
        if GROUPS not in stored or state.codes is None:
            return state
        order = stored[GROUPS].argsort(stable=True)
        return state._replace(codes=state.codes[:, order], order=order)
