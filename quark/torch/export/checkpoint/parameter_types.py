"""Types of the float parameters of a quantized checkpoint: one for all, as Transformers has it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.formats.base import ExportFormat
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.name_lookup import names_as_subject

logger = logging.getLogger("quark")


def with_usual_type(
    reader: Any,
    model: nn.Module,
    fmt: ExportFormat,
    outline: Mapping[str, torch.Tensor],
    layers: Collection[str],
) -> Any:
    """Return a reader whose float tensors outside of quantized layers have types that fit together.

    A tensor keeps its stored type if it is that of most of these tensors, or the one that the model
    has for it, or a float32 in which Transformers keeps it. Others are converted to the type of
    most, with a warning: torch does not multiply a float64 norm by float32 weights. Quantized
    layers compute in the type of their inputs, so their tensors stay as stored.

    Args:
        reader: Tensors of a checkpoint, which fit the model.
        model: The float architecture.
        fmt: Format of the checkpoint.
        outline: The state that the model will have, on the meta device.
        layers: Names of the quantized layers.
    """
    state = model.state_dict()
    stored: dict[str, str] = {}  # name in the reader -> name in the model
    for key, header in reader.entries.items():
        name = fmt.state_name(key)
        is_plain = name in state and name in outline and name.rpartition(".")[0] not in layers
        if is_plain and _is_wide(header.dtype) and _is_wide(outline[name].dtype):
            stored[key] = name
    usual = _usual_type(
        [reader.entries[key].dtype for key in stored],
        [outline[name].dtype for name in stored.values()],
    )
    kept = kept_types(model, usual) if usual is not None else {}
    odd = {
        key: reader.entries[key].dtype
        for key, name in stored.items()
        if reader.entries[key].dtype not in (usual, outline[name].dtype, kept.get(name))
    }
    if not odd or usual is None:
        return reader
    logger.warning(
        "%s converted from %s to %s, the type of most other parameters.",
        names_as_subject([stored[key] for key in odd]),
        ", ".join(sorted({type_name(dtype) for dtype in odd.values()})),
        type_name(usual),
    )
    return _ConvertingReader(reader, odd, usual)


def kept_types(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return names of tensors -> other types in which Transformers keeps them.

    Args:
        model: A model, of Transformers or not.
        dtype: Type of the other tensors. Some are kept in float32 beside float16 alone.
    """
    wide = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    if not wide:
        return {}
    from transformers.core_model_loading import build_glob_alternation

    pattern, patterns, _ = build_glob_alternation(list(wide))
    matches = ((name, pattern.search(name)) for name in model.state_dict())
    return {name: wide[patterns[m.lastgroup]] for name, m in matches if m is not None}


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _usual_type(stored: list[torch.dtype], expected: list[torch.dtype]) -> torch.dtype | None:
    """Return the type of most stored tensors; of several, the one that the model has more often.

    Args:
        stored: Types of the stored tensors.
        expected: Types that the model has for them.
    """
    votes, ties = Counter(stored), Counter(expected)
    return max(votes, key=lambda dtype: (votes[dtype], ties[dtype]), default=None)


class _ConvertingReader:
    """Tensors of another reader, some of them in another type."""

    def __init__(self, reader: Any, odd: Collection[str], dtype: torch.dtype) -> None:
        self._reader, self._odd, self._dtype = reader, frozenset(odd), dtype
        self.metadata: dict[str, str] = getattr(reader, "metadata", {})
        self.entries: dict[str, TensorHeader] = {
            key: header._replace(dtype=dtype, stored_bytes=header.nbytes) if key in odd else header
            for key, header in reader.entries.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return self._converted(key, self._reader.tensor(key))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self._reader.tensors():
            yield key, self._converted(key, tensor)

    def _converted(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if key in self._odd else tensor
