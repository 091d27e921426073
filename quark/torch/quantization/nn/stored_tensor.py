"""Operators that read the stored parts of a tensor, for graphs of ``torch.compile``.

The tracer of ``torch.compile`` fails on the Python code of some layouts. So it sees the operators
of this file instead. They take the stored parts, and a key that stands for layout, specification
and shape. The key is a digest of these, so that equal layers share a compiled graph.
``torch.export`` runs the code of layouts and needs neither.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quark.torch.numerics.custom_operators import define_operator
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.tensor_layout import StoredParts, TensorLayout


class StoredTensor(NamedTuple):
    """How a tensor is stored.

    Attributes:
        layout: Layout of its parts.
        spec: Its specification.
        shape: Its shape, unpacked.
    """

    layout: TensorLayout
    spec: QuantizationSpec
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """A digest, equal for tensors that are stored alike, in every process."""
        spec = self.spec.to_dict(), self.spec.is_parameter
        text = json.dumps([_describe(self.layout), spec, self.shape], default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_STORED: dict[str, StoredTensor] = {}  # the tensors of this process, by their keys


def register_stored_tensor(stored: StoredTensor) -> str:
    """Return the key by which the operators know how a tensor is stored."""
    key = stored.key
    _STORED[key] = stored
    return key


def read_values(parts: Mapping[str, torch.Tensor], key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a tensor in ``dtype``, by an operator.

    Args:
        parts: The stored parts; see ``TensorLayout``.
        key: Key of the tensor.
        dtype: Type of the values.
    """
    return _read_values([*parts.values()], ",".join(parts), key, dtype)


def read_scales(
    parts: Mapping[str, torch.Tensor], key: str
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return scale, zero point and tensor scale of an activation, by an operator."""
    if not parts:
        return None, None, None
    scale, zero_point, scale_2 = _read_scales([*parts.values()], ",".join(parts), key)
    return _or_none(scale), _or_none(zero_point), _or_none(scale_2)


def _stored_tensor(key: str) -> StoredTensor:
    if key not in _STORED:
        raise LookupError(
            f"No layer of this process stores a tensor with the key {key}: another process made "
            "the graph. Load its checkpoint first, or make the program by torch.export.export "
            "without strict=True."
        )
    return _STORED[key]


def _or_none(x: torch.Tensor) -> torch.Tensor | None:
    return x if x.numel() else None


def _describe(layout: TensorLayout) -> list[Any]:
    options = {
        name: _describe(value) if isinstance(value, TensorLayout) else value
        for name, value in vars(layout).items()
    }
    return [type(layout).__module__, type(layout).__qualname__, options]


def _named(parts: list[torch.Tensor], names: str) -> StoredParts:
    return dict(zip(names.split(","), parts, strict=True))


@define_operator("read_values(Tensor[] parts, str names, str key, ScalarType dtype) -> Tensor")
def _read_values(
    parts: list[torch.Tensor], names: str, key: str, dtype: torch.dtype
) -> torch.Tensor:
    layout, spec, shape = _stored_tensor(key)
    values = layout.value(spec, shape, _named(parts, names), dtype).contiguous()
    return values.clone() if layout.stores_values else values


@_read_values.register_fake
def _(parts: list[torch.Tensor], names: str, key: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(_stored_tensor(key).shape, dtype=dtype, device=parts[0].device)


@define_operator("read_scales(Tensor[] parts, str names, str key) -> Tensor[]")
def _read_scales(parts: list[torch.Tensor], names: str, key: str) -> list[torch.Tensor]:
    return _scales(parts, names, key)


@_read_scales.register_fake
def _(parts: list[torch.Tensor], names: str, key: str) -> list[torch.Tensor]:
    return _scales(parts, names, key)


def _scales(parts: list[torch.Tensor], names: str, key: str) -> list[torch.Tensor]:
    """Return scale, zero point and tensor scale as new tensors, empty for None."""
    layout, spec, shape = _stored_tensor(key)
    state: QuantizedTensor = layout.unpack(spec, shape, _named(parts, names))
    scales = state.scale, state.zero_point, state.scale_2
    return [parts[0].new_empty(0) if x is None else x.clone() for x in scales]
