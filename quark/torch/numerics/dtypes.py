"""Types of tensors by name. A name needs no torch, which is imported where a type is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Name of a type of torch -> bytes of an element.
ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
    "uint32": 4,
    "uint64": 8,
    "complex64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}


def type_name(dtype: torch.dtype | str) -> str:
    """Return the name of a type, such as ``float32``: without ``torch.``; a name is returned."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the type of torch with a name.

    Raises:
        ValueError: torch has no such type.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a type of torch.")
    return dtype
