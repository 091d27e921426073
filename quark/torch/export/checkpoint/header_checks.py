"""Comparison of the tensors that a model needs with the headers of the tensors that files hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from math import prod

import torch
from torch import nn

from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.quantization.config.name_lookup import names_as_subject, nearest


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return names of tied tensors -> names of the tensors that they are tied to."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = first.setdefault(id(tensor), name)
        if source != name and name not in tied.values():
            tied.setdefault(name, source)
    return tied


def check_headers(
    stored: Mapping[str, TensorHeader],
    needed: Mapping[str, torch.Tensor],
    optional: Collection[str],
    may_ignore: Callable[[str], bool],
    what: str,
) -> None:
    """Check that every needed tensor is stored with its shape and type, and nothing else is.

    Args:
        stored: Headers by the names of the model.
        needed: State of the model, on any device.
        optional: Names of needed tensors that may be missing.
        may_ignore: Whether a stored tensor that is not needed can be ignored.
        what: What the model is called in the message.

    Raises:
        ValueError: The message names tensors that are missing, unexpected or of another shape or
            type.
    """
    missing = [name for name in needed if name not in stored and name not in optional]
    extra = [name for name in stored if name not in needed and not may_ignore(name)]
    wrong = [
        f"{name} is {header.dtype} {list(header.shape)}, expected {t.dtype} {list(t.shape)}"
        for name, t in needed.items()
        if (header := stored.get(name)) and not fits(header, t, is_offset(name, needed))
    ]
    problems = []
    if missing:
        near = nearest(missing[0], stored, 1)
        problems.append(
            f"{names_as_subject(missing)} missing" + (f" (there is {near[0]})" if near else "")
        )
    if extra:
        problems.append(f"{names_as_subject(extra)} unexpected")
    if wrong:
        problems.append("; ".join(wrong[:3]) + (" …" if len(wrong) > 3 else ""))
    if problems:
        raise ValueError(f"The checkpoint does not fit {what}: {'; '.join(problems)}.")


def unused_names(stored: Collection[str], needed: Collection[str]) -> list[str]:
    """Return stored names that a float model does not use, and that belong to none of its parts.

    A name that differs from a needed one in its numbers alone, such as ``layers.7`` of a model with
    four layers, is not returned: such a tensor is one that the model lacks.

    Args:
        stored: Names of the stored tensors.
        needed: Names of the tensors of the model.
    """
    parts = {_numbered(name) for name in needed}
    return [name for name in stored if name not in needed and _numbered(name) not in parts]


def _numbered(name: str) -> str:
    """Return a name with # for each number: ``layers.7.norm`` -> ``layers.#.norm``."""
    return re.sub(r"\d+", "#", name)


def is_offset(name: str, needed: Mapping[str, torch.Tensor]) -> bool:
    """Whether a tensor holds a zero point in each element, as many as scales.

    Packed zero points are words of several codes: they are of one type.

    Args:
        name: Name of the tensor.
        needed: Tensors of the model or layer, with the scales of the same quantizer.
    """
    prefix, _, last = name.rpartition("zero_point")
    scale = needed.get(f"{prefix}scale")
    return not last and scale is not None and scale.numel() == needed[name].numel()


def fits(header: TensorHeader, expected: torch.Tensor, is_offset: bool) -> bool:
    """Whether shapes agree, and types do or are both wide floats.

    Tools differ in two ways: a single number has any shape of one element, and integer offsets are
    of any width. Offsets of one width are of one type: as int8, the byte 200 of uint8 is -56.
    """
    if header.shape != tuple(expected.shape) and not prod(header.shape) == expected.numel() == 1:
        return False
    both = (header.dtype, expected.dtype)
    wide = all(d.is_floating_point and d.itemsize > 1 for d in both)
    offsets = is_offset and not any(d.is_floating_point for d in both)
    return both[0] == both[1] or wide or (offsets and both[0].itemsize != both[1].itemsize)
