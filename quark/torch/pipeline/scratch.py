"""Scratch files: values that passes over a model have changed and that memory does not hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from quark.torch.files import check_space, size_of


class _Place(NamedTuple):
    """Where a tensor is: its file, and its strides in memory before it was written."""

    file: str
    strides: tuple[int, ...]


class Scratch:
    """Tensors by name in files of a directory; the newest tensor of a name is the one that is read.

    Args:
        directory: The directory; None for a temporary one.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._temporary = None
        if directory is None:
            self._temporary = tempfile.TemporaryDirectory(
                prefix="quark-weights-", ignore_cleanup_errors=True
            )
        self.directory = Path(directory or self._temporary.name)  # type: ignore[union-attr]
        self._places: dict[str, _Place] = {}
        self._numbers = count()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors among some names that are here, on the CPU.

        The order of their axes in memory is as it was, by which products choose how they round.
        """
        from safetensors import safe_open

        by_file: dict[str, list[str]] = {}
        for name in names:
            if name in self._places:
                by_file.setdefault(self._places[name].file, []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, inside in by_file.items():
            with safe_open(self.directory / file, framework="pt") as opened:
                for name in inside:
                    tensors[name] = _with_strides(
                        opened.get_tensor(name), self._places[name].strides
                    )
        return tensors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors, which replace earlier ones of their names.

        Raises:
            OSError: The disk is full.
        """
        from safetensors.torch import save_file

        if not tensors:
            return
        check_space(self.directory, size_of(dict(tensors)))
        file = f"{next(self._numbers)}.safetensors"
        stored = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        save_file(stored, self.directory / file)
        old = {self._places[name].file for name in tensors if name in self._places}
        self._places |= {name: _Place(file, t.stride()) for name, t in tensors.items()}
        self._sweep(old)

    def clear(self) -> None:
        """Remove all tensors."""
        files = {place.file for place in self._places.values()}
        self._places.clear()
        self._sweep(files)

    def _sweep(self, files: Iterable[str]) -> None:
        """Remove those of some files whose tensors have all been replaced."""
        used = {place.file for place in self._places.values()}
        for file in set(files) - used:
            (self.directory / file).unlink(missing_ok=True)


def _with_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)
