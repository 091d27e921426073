"""GGUF files as the source of a float model: each tensor is dequantized when it is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.dequantized import fill_model
from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.checkpoint.header_checks import check_headers
from quark.torch.export.gguf.architectures import import_gguf
from quark.torch.export.gguf.blocks import (
    block_spec,
    has_codes,
    has_float_minima,
    unpack_blocks,
)
from quark.torch.export.gguf.matching import (
    FLOAT_TYPES,
    GgufModel,
    float_values,
    match_gguf,
    rows_of,
    tensor_scale,
)

_ELEMENTS = 1 << 22  # that are dequantized together: their values in float32 take 16 MiB


def open_gguf_in_float(
    path: Path, dtype: torch.dtype | None = None, **options: Any
) -> tuple[nn.Module, GgufValues]:
    """Return the float model of a GGUF file, on the meta device, and the reader of its values.

    Args:
        path: The file.
        dtype: Type of the parameters; None for the type of the tensors that are not quantized.
        options: Passed to Transformers, such as ``attn_implementation``.

    Raises:
        ImportError: The package gguf is missing.
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, tensors have other shapes than the model, or the
            architecture or a tensor type is not supported.
    """
    match = match_gguf(path, dtype, **options)
    model, values = match.model, GgufValues(match)
    check_headers(
        values.entries, model.state_dict(), match.tied, lambda _: False, type(model).__name__
    )
    return model.eval(), values


class GgufValues:
    """The values of a GGUF file under the names of its float model.

    Args:
        match: The file and its model.

    Attributes:
        entries: Headers of the tensors. Tied ones are left out.

    Raises:
        ValueError: A tensor is of a type that the package gguf does not dequantize.
    """

    def __init__(self, match: GgufModel) -> None:
        self._match = match
        self.entries: dict[str, TensorHeader] = {}
        for key, source in match.sources.items():
            _check_kind(match.kind(key), f"{match.file.path}: {source.names[0]}")
        for key, parameter in match.model.state_dict().items():
            if key in match.stacked or key in match.sources:
                is_whole = key in match.stacked  # ``match`` compared the shapes of its parts
                shape = tuple(parameter.shape) if is_whole else match.sources[key].shape
                self.entries[key] = TensorHeader(match.file.path.name, shape, match.dtype)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor, in the type of the model.

        Raises:
            ValueError: A scale is not finite.
        """
        if name in self._match.stacked:
            return self._match.stack(name, self._value, self._match.dtype)
        return self._value(name)

    def _value(self, name: str) -> torch.Tensor:
        """Return one tensor by its name in the model with split experts."""
        match, source = self._match, self._match.sources[name]
        kind = match.kind(name)
        if kind in FLOAT_TYPES:
            return float_values(match, name).to(match.dtype)
        blocks = rows_of(match, name)
        values = torch.empty(source.shape, dtype=match.dtype, device="cpu")
        matrix, rows = values.view(-1, source.shape[-1]), blocks.reshape(-1, blocks.shape[-1])
        step, scale = max(1, _ELEMENTS // source.shape[-1]), tensor_scale(match.file, source)
        for start in range(0, len(matrix), step):
            part = slice(start, start + step)
            matrix[part] = _dequantize(rows[part], kind, source.names[0], scale)
        return values

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors, in the order of the model."""
        for name in self.entries:
            yield name, self.tensor(name)

    def fill(self, model: nn.Module) -> nn.Module:
        """Read all tensors into a float model on the meta device, in place, and return it.

        Raises:
            ValueError: A scale, or a parameter, is not finite.
        """
        return fill_model(model, self, self._match.tied)


def _dequantize(
    rows: torch.Tensor, kind: str, name: str, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the values of rows of blocks, (rows, elements) float32."""
    if has_codes(kind) and not has_float_minima(kind):
        state = unpack_blocks(rows, block_spec(kind, rows, name), kind, scale)
        return state.value(torch.float32)
    gguf = import_gguf()
    return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))


def _check_kind(kind: str, where: str) -> None:
    """Check that the package gguf dequantizes a type of blocks.

    Raises:
        ValueError: It does not.
    """
    if kind in FLOAT_TYPES or has_codes(kind):
        return
    gguf = import_gguf()
    rows, bytes_per_block = 1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    try:
        gguf.dequantize(
            torch.zeros(rows, bytes_per_block, dtype=torch.uint8, device="cpu").numpy(),
            gguf.GGMLQuantizationType[kind],
        )
    except NotImplementedError:
        raise ValueError(
            f"{where} is {kind}, which this version of the package gguf does not dequantize: "
            "install a newer one, or give the model in another type."
        ) from None
