"""A parameter stored as codes that answers, and computes, as its values would.

Models read more of a layer than its outputs: ``x.to(layer.weight.dtype)``, ``model.dtype``, or
``F.linear(x, layer.weight)``. With bare codes these would be int8 or float8.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

_ATEN = torch.ops.aten


class PackedParameter(torch.Tensor):
    """Codes of a parameter, with type, shape and device of its values.

    A move to another device moves the codes. Every other operation computes with the values, which
    are unpacked for it; writing in place is an error. A copy (``copy.deepcopy``, pickle), and a
    move to the meta device, give a plain parameter with the codes, which the layer wraps again.
    """

    _held: torch.Tensor | None
    _layer: weakref.ref[Any]
    _name: str

    # Results are plain tensors; without this torch would give them this class.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Any:
        """Return a parameter: libraries that move one make it anew by its type."""
        return data if isinstance(data, PackedParameter) else nn.Parameter(data, False)

    def __init__(self, data: torch.Tensor, requires_grad: bool = False) -> None:
        """See ``__new__``."""

    @classmethod
    def wrap(cls, codes: torch.Tensor, layer: Any, name: str) -> PackedParameter:
        """Wrap the codes of a parameter of a packed layer.

        Args:
            codes: The stored tensor.
            layer: The layer, which unpacks codes (``unpack_parameter``). It is held weakly, so that
                its memory is freed as soon as it is dropped.
            name: ``weight`` or ``bias``.
        """
        made: PackedParameter = torch.Tensor._make_wrapper_subclass(
            cls, layer.parameter_shape(name), dtype=layer.value_dtype, device=codes.device
        )
        made.__dict__.update(vars(codes))  # marks that libraries put on parameters
        made.codes = codes.requires_grad_(False)
        made._layer, made._name = weakref.ref(layer), name
        made._is_param = True  # isinstance(made, nn.Parameter)
        return made

    @property
    def codes(self) -> torch.Tensor:
        """The stored tensor; the layer restores it if it holds the weight in another form."""
        if self._held is None:
            return self._owner().stored_codes(self._name)  # type: ignore[no-any-return]
        return self._held

    @codes.setter
    def codes(self, codes: torch.Tensor) -> None:
        self._held = codes

    def drop_codes(self) -> None:
        """Hold no codes: the layer restores them when they are read."""
        self._held = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and _returns_view(func):
            # torch refuses a view of a normal tensor that was made in inference mode
            with torch.inference_mode(False):
                return cls._compute(func, args, kwargs or {})
        return cls._compute(func, args, kwargs or {})

    @classmethod
    def _compute(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation of torch."""
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return args[0]._with_codes(args[0].codes)
        if func is _ATEN._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            kwargs.pop("dtype", None)
            codes = func(args[0].codes, **kwargs)
            return codes if codes.is_meta else args[0]._with_codes(codes)
        written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument in written and isinstance(value, PackedParameter):
                raise RuntimeError(
                    f"{func} writes to a packed {value._name}, which holds codes: quantize the "
                    "float model again, or load other codes by load_state_dict."
                )
        args, kwargs = tree_map(_unpacked, (args, kwargs))
        return func(*args, **kwargs)

    def _with_codes(self, codes: torch.Tensor) -> PackedParameter:
        return PackedParameter.wrap(codes, self._owner(), self._name)

    def _owner(self) -> Any:
        layer = self._layer()
        if layer is None:
            raise RuntimeError(
                f"The layer of this packed {self._name} was dropped, and its scales with it: keep "
                "the model, or take layer.value() for the values."
            )
        return layer

    def unpack(self) -> torch.Tensor:
        """Return the values as a plain tensor."""
        result: torch.Tensor = self._owner().unpack_parameter(self._name, self.codes, self.dtype)
        return result

    @property
    def data(self) -> torch.Tensor:
        """The same parameter; other codes of the same shape and type can be put in place."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        codes = value.codes if isinstance(value, PackedParameter) else value
        if codes.shape != self.codes.shape or codes.dtype != self.codes.dtype:
            raise RuntimeError(
                f"A packed {self._name} takes codes {tuple(self.codes.shape)} {self.codes.dtype}, "
                f"got {tuple(codes.shape)} {codes.dtype}."
            )
        self.codes = codes.detach()
        self._owner().keep_codes(self._name, self.codes)

    def data_ptr(self) -> int:
        """Return the address of the codes."""
        return self.codes.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the codes."""
        return self.codes.untyped_storage()

    def element_size(self) -> int:
        """Return how many bytes of memory a value takes, rounded up."""
        return -(-self.codes.nbytes // max(self.numel(), 1))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with a copy of the codes."""
        return nn.Parameter(self.codes.clone(), False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter with the codes."""
        return nn.Parameter, (self.codes, False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return type and shape of the values and of the codes."""
        return (
            f"PackedParameter({tuple(self.shape)}, {self.dtype}, "
            f"codes={tuple(self.codes.shape)} {self.codes.dtype})"
        )


def is_exporting() -> bool:
    """Whether ``torch.export`` is turning a model into a graph."""
    tracer = sys.modules.get("torch.export._trace")
    return getattr(tracer, "_EXPORT_MODULE_HIERARCHY", None) is not None


def _returns_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _unpacked(leaf: Any) -> Any:
    return leaf.unpack() if isinstance(leaf, PackedParameter) else leaf
