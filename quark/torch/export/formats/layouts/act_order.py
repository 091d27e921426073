"""Groups of inputs in another order than they come in, as GPTQ with act order makes them.

The layer keeps the group of each input beside codes in the order of the inputs. In full its codes
are in the order of the groups, where those of a group are neighbours like everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.packed import Declared, Layout, PackedMixin, Stored
from quark.torch.quantization.nn.quantizer import State

GROUPS = "groups"  # part of a tensor: group of each input, int32 (inputs,)
PROBLEM = "its inputs are grouped in another order than they come in (act order)"


def has_order(layer: Any) -> bool:
    """Whether the groups of a layer may be in another order than its inputs."""
    return isinstance(layer, PackedMixin) and layer.weight_groups is not None


def is_in_order(groups: torch.Tensor, sizes: Iterable[int], where: str) -> bool:
    """Whether inputs come in the order of their groups.

    Args:
        groups: Group of each input, (inputs,).
        sizes: Inputs of a group that the configuration allows, -1 for all.
        where: Name of the tensor, for messages.

    Raises:
        ValueError: The groups are of other sizes.
    """
    groups = groups.flatten().long()
    places = torch.arange(len(groups))
    whole = [places // (size if size > 0 else max(len(groups), 1)) for size in sizes]
    if any(groups.equal(one) for one in whole):
        return True
    if not any(groups.sort().values.equal(one) for one in whole):
        raise ValueError(
            f"{where}: inputs are not in groups of {' or '.join(map(str, sorted(sizes)))} each "
            "(group_size), whatever their order (act order)."
        )
    return False


class OrderedLayout:
    """A layout that stores the group of each input of weights per group too.

    Args:
        layout: How codes, scales and zero points lie.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of each part."""
        stored = self.layout.declare(spec, shape, is_stored)
        if is_stored and spec.scheme.has_zero_point and spec.scheme.group > 0:
            stored[GROUPS] = (shape[1],), torch.int32
        return stored

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return the parts as they are stored, codes in the order of the inputs."""
        if state.order is None:
            return self.layout.pack(state, value)
        assert state.codes is not None
        codes = torch.empty_like(state.codes).index_copy_(1, state.order, state.codes)
        sorted_groups = torch.arange(len(state.order), device=codes.device) // state.scheme.group
        groups = torch.empty_like(sorted_groups).index_copy_(0, state.order, sorted_groups)
        stored = self.layout.pack(state._replace(codes=codes, order=None), value)
        return {**stored, GROUPS: groups.int()}

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return the tensor in full, codes in the order of the groups."""
        state = self.layout.unpack(spec, shape, stored)
        if GROUPS not in stored or state.codes is None:
            return state
        order = stored[GROUPS].argsort(stable=True)
        return state._replace(codes=state.codes[:, order], order=order)

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of the codes in ``dtype``, in the order of the inputs."""
        return self.unpack(spec, shape, stored).value(dtype)
