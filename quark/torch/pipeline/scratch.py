"""Scratch files: values that passes over a model have changed and that memory does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from quark.torch.files import check_space, size_of
from quark.torch.pipeline.temporary_directory import TemporaryDirectory


class _Place(NamedTuple):
    """Where a tensor is: its file, its name there, and its strides before it was written."""

    file: Path
    key: str
    strides: tuple[int, ...]


class Scratch:
    """Tensors by name in files of a directory; the newest tensor of a name is the one that is read.

    Args:
        directory: The directory; None for a temporary one.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        if directory is None:
            self._temporary = TemporaryDirectory("quark-weights-")  # removed with this object
            directory = self._temporary.path
        self.directory = Path(directory)
        self._places: dict[str, _Place] = {}
        self._own: set[Path] = set()
        self._numbers = count()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors among some names that are here, on the CPU.

        The order of their axes in memory is as it was, by which products choose how they round.
        """
        from safetensors import safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            if name in self._places:
                by_file.setdefault(self._places[name].file, []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, inside in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in inside:
                    _, key, strides = self._places[name]
                    tensors[name] = with_strides(opened.get_tensor(key), strides)
        return tensors

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors, which replace earlier ones of their names.

        Raises:
            OSError: The disk is full.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        if not tensors:
            return
        check_space(self.directory, size_of(dict(tensors)))
        file = self.directory / f"{next(self._numbers)}.safetensors"
        stored = {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}
        self._own.add(file)
        try:
            save_file(stored, file)
        except SafetensorError as error:
            raise OSError(f"{self.directory} has no room for changed weights ({error}).") from None
        self._replace({name: _Place(file, name, t.stride()) for name, t in tensors.items()})

    def refer(self, file: Path, keys: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        """Read tensors from a file that others wrote, and that stays when they are replaced.

        Args:
            file: The file.
            keys: Name of a tensor -> its name in the file, and the tensor.
        """
        self._replace({name: _Place(file, key, t.stride()) for name, (key, t) in keys.items()})

    def _replace(self, places: dict[str, _Place]) -> None:
        self._places |= places
        self._sweep()

    def clear(self) -> None:
        """Remove all tensors."""
        self._places.clear()
        self._sweep()

    def _sweep(self) -> None:
        """Remove own files whose tensors have all been replaced."""
        used = {place.file for place in self._places.values()}
        for file in self._own - used:
            # Windows removes no file while a tensor that was read maps it: the next sweep does.
            with suppress(PermissionError):
                file.unlink(missing_ok=True)
                self._own.discard(file)


def with_strides(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with its axes in another order in memory, by which products round."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device="cpu").copy_(x)
