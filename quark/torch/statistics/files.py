"""Statistics as files: ``statistics.json``, and ``statistics.safetensors`` read layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quark.torch.algorithm.kept import Statistics
from quark.torch.algorithm.statistics import Gram
from quark.torch.export.checkpoint import fresh_directory, read_json, write_json

HEADER, TENSORS = "statistics.json", "statistics.safetensors"
LAYOUT = 1  # of the files; another is refused
_PARTS = ("total", "magnitude")
_KINDS = {
    "model": dict,
    "data": str,
    "readers": dict,
    "tokens": dict,
    "units": list,
    "sensitivities": dict,
}


def save_statistics(statistics: Statistics, path: str | Path, overwrite: bool = False) -> None:
    """Write statistics to a directory, which stands there whole or not at all.

    Args:
        statistics: What ``collect_statistics`` returned.
        path: Directory to write.
        overwrite: Whether an existing directory may be replaced.

    Raises:
        FileExistsError: The directory is in use.
        OSError: The disk has too little room.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, gram in statistics.inputs.items():
        if gram.total is not None and gram.magnitude is not None:
            tensors |= {f"{name}.total": gram.total, f"{name}.magnitude": gram.magnitude}
    header = {
        "layout": LAYOUT,
        "model": dict(statistics.model),
        "data": statistics.data,
        "readers": dict(statistics.readers),
        "tokens": {name: gram.tokens for name, gram in statistics.inputs.items()},
        "units": [list(unit) for unit in statistics.units],
        "sensitivities": dict(statistics.sensitivities),
    }
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with fresh_directory(path, overwrite, needed) as directory:
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        write_json(directory / HEADER, header)


def load_statistics(path: str | Path) -> Statistics:
    """Open statistics; sums over tokens are read when they are asked for.

    Raises:
        FileNotFoundError: The directory holds none.
        ValueError: A file is damaged, or of another version.
    """
    header = read_json(Path(path) / HEADER)
    if not _is_header(header):
        raise ValueError(
            f"{Path(path) / HEADER} holds no statistics that this version reads: collect them "
            "anew with 'quark collect'."
        )
    return Statistics(
        header["model"],
        header["data"],
        header["readers"],
        _Stored(Path(path) / TENSORS, header["tokens"]),
        tuple(tuple(unit) for unit in header["units"]),
        header["sensitivities"],
    )


def _is_header(header: Any) -> bool:
    if not isinstance(header, dict) or header.get("layout") != LAYOUT:
        return False
    return all(isinstance(header.get(key), kind) for key, kind in _KINDS.items())


class _Stored(Mapping[str, Gram]):
    """Sums in a file, by the name of the layer."""

    def __init__(self, path: Path, tokens: dict[str, float]) -> None:
        from safetensors import SafetensorError, safe_open

        self._tokens = tokens
        try:
            self._file: Any = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): collect the statistics anew.") from None
        self._keys = set(self._file.keys())  # type: ignore[no-untyped-call]
        expected = {f"{name}.{part}" for name, n in tokens.items() if n for part in _PARTS}
        if expected != self._keys:
            raise ValueError(f"{path} lacks tensors of its header: collect the statistics anew.")

    def __getitem__(self, name: str) -> Gram:
        gram = Gram()
        gram.tokens = self._tokens[name]
        if f"{name}.total" in self._keys:
            gram.total, gram.magnitude = (self._file.get_tensor(f"{name}.{p}") for p in _PARTS)
        return gram

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)
