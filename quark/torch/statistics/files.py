"""Statistics on disk: ``statistics.json``, and ``statistics.safetensors`` read layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from quark.torch.digests import check_unchanged
from quark.torch.files import fresh_directory, read_json, write_json
from quark.torch.numerics.finite import is_finite
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.statistics import Probe, Statistics
from quark.torch.pipeline.tensor_ranges import TensorRange
from quark.torch.quantization.config.value_types import check_types, check_value
from quark.torch.quantization.observer.histogram import BINS

HEADER, TENSORS = "statistics.json", "statistics.safetensors"
ANEW = "Give statistics that are whole, or collect them anew with 'quark collect'."
LAYOUT = 3  # version of the files; others are refused
FLOATS = ("F32", "F16", "BF16", "F64")  # of samples
SUMS, RANGE = ("total", "magnitude"), ("lo", "hi", "counts")
_KINDS = {
    "model": dict[str, str],
    "data": str,
    "readers": dict[str, str],
    "tokens": dict[str, float],
    "units": list[list[str]],
    "probes": dict[str, tuple[float, int, float]],
    "samples": list[str],
    "ranges": list[str],
    "letters": dict[str, int],
    "fine_probes": dict[str, tuple[float, int, float]],
}
_PROBES = ("probes", "fine_probes")
# What earlier files of this layout lack.
_LATER: dict[str, Any] = {"letters": {}, "fine_probes": {}}

T = TypeVar("T")


def save_statistics(statistics: Statistics, path: str | Path, overwrite: bool = False) -> None:
    """Write statistics to a directory, which appears complete or not at all.

    Args:
        statistics: The result of ``collect_statistics`` or ``merge_statistics``.
        path: Directory to write.
        overwrite: Whether an existing directory may be replaced.

    Raises:
        FileExistsError: The directory is in use.
        OSError: The disk has too little space.
    """
    from safetensors.torch import save_file

    check_types(bool, overwrite=overwrite)
    tensors: dict[str, torch.Tensor] = {}
    for name, gram in statistics.inputs.items():
        if gram.total is not None and gram.magnitude is not None:
            tensors |= {f"{name}.total": gram.total, f"{name}.magnitude": gram.magnitude}
    for name, tensor in statistics.ranges.items():
        lo, hi = tensor.channels.lo, tensor.channels.hi
        assert lo is not None and hi is not None
        tensors |= {f"{name}.lo": lo, f"{name}.hi": hi, f"{name}.counts": tensor.histogram.counts}
    tensors |= {f"{name}.sample": tokens for name, tokens in statistics.samples.items()}
    header = {
        "layout": LAYOUT,
        "model": dict(statistics.model),
        "data": statistics.data,
        "readers": dict(statistics.readers),
        "tokens": dict(statistics.tokens),
        "units": [list(unit) for unit in statistics.units],
        "probes": dict(statistics.probes),
        "samples": list(statistics.samples),
        "ranges": list(statistics.ranges),
        "letters": dict(statistics.letters),
        "fine_probes": dict(statistics.fine_probes),
    }
    needed = sum(tensor.nbytes for tensor in tensors.values())
    with fresh_directory(path, overwrite, needed) as directory:
        save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
        write_json(directory / HEADER, header)


def load_statistics(path: str | Path, check_digests: bool = False) -> Statistics:
    """Open statistics; each tensor is read when it is accessed.

    Args:
        path: Directory of ``save_statistics``.
        check_digests: Whether its files are first compared with the digests that were written with
            them.

    Raises:
        FileNotFoundError: The directory holds no statistics, or no digests of them.
        ValueError: A file has changed, is damaged, or of another version. A tensor that holds NaN
            or infinite values raises when it is accessed.
    """
    check_types(bool, check_digests=check_digests)
    if check_digests:
        check_unchanged(Path(path))
    header = _read_header(Path(path) / HEADER)
    tokens, samples, ranges = header["tokens"], header["samples"], header["ranges"]
    file = _open(Path(path) / TENSORS, _list_tensors(tokens, samples, ranges))

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = file.get_tensor(name)
        if not is_finite(tensor):
            raise ValueError(f"{Path(path) / TENSORS}: {name} holds NaN or infinity. {ANEW}")
        return tensor

    def gram(name: str) -> Gram:
        result = Gram()
        result.tokens = tokens[name]
        if result.tokens:
            result.total, result.magnitude = (read(f"{name}.{part}") for part in SUMS)
        return result

    def tensor_range(name: str) -> TensorRange:
        return TensorRange.from_tensors(*(read(f"{name}.{part}") for part in RANGE))

    return Statistics(
        header["model"],
        header["data"],
        header["readers"],
        _LazyMapping(tokens, gram),
        tokens,
        tuple(tuple(unit) for unit in header["units"]),
        {name: Probe(*probe) for name, probe in header["probes"].items()},
        _LazyMapping(samples, lambda name: read(f"{name}.sample")),
        _LazyMapping(ranges, tensor_range),
        header["letters"],
        {name: Probe(*probe) for name, probe in header["fine_probes"].items()},
    )


def _read_header(path: Path) -> dict[str, Any]:
    """Return a header whose values have their types, and whose parts name the same layers.

    Raises:
        ValueError: It is of another version, or damaged; the message has the path to the value.
    """
    header = read_json(path)
    if not isinstance(header, dict) or header.get("layout") != LAYOUT:
        raise ValueError(f"{path} holds no statistics that this version can read. {ANEW}")
    header = _LATER | header
    for key, kind in _KINDS.items():
        try:
            check_value(header.get(key), kind, key)
        except ValueError as error:
            raise ValueError(f"{path}: {error} {ANEW}") from None
    layers, first = set(header["readers"]), set(header["tokens"])
    named = {name for unit in header["units"] for name in unit}
    for key, names in {"units": named, "probes": set(header["probes"]) or layers}.items():
        if missing := sorted(layers - names):
            raise ValueError(f"{path}: {key} lacks the layer {missing[0]!r}. {ANEW}")
    named |= {name for key in _PROBES for name in header[key]}
    unknown = sorted((named - layers) | (set(header["readers"].values()) - first))
    unknown += sorted(set(header["samples"]) - first)
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is no layer of its readers. {ANEW}")
    counts = [(f"{key}.{x}", n) for key in ("tokens", "letters") for x, n in header[key].items()]
    for key in _PROBES:
        counts += [(f"{key}.{x}", min(probe[1:])) for x, probe in header[key].items()]
    wrong = [name for name, count in counts if count < 0]
    if wrong:
        raise ValueError(f"{path}: {wrong[0]} is negative. {ANEW}")
    return header


def _list_tensors(
    tokens: Mapping[str, float], samples: Iterable[str], ranges: Iterable[str]
) -> Iterator[str]:
    """Iterate over the names of the tensors that a header lists."""
    yield from (f"{name}.{part}" for name, count in tokens.items() if count for part in SUMS)
    yield from (f"{name}.sample" for name in samples)
    yield from (f"{name}.{part}" for name in ranges for part in RANGE)


def _open(path: Path, expected: Iterable[str]) -> Any:
    """Return an open file of tensors.

    Raises:
        ValueError: It is damaged, or holds other tensors than expected.
    """
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): collect the statistics anew.") from None
    if set(expected) != set(file.keys()):
        raise ValueError(f"{path} lacks tensors of its header: collect the statistics anew.")
    for name in file.keys():  # noqa: SIM118 - not a mapping
        _check_tensor(file, name, path)
    return file


def _check_tensor(file: Any, name: str, path: Path) -> None:
    """Check type and shape of a stored tensor.

    Raises:
        ValueError: They are not those of such a tensor.
    """
    owner, _, part = name.rpartition(".")
    kind, shape = _header(file, name)
    width = shape[-1] if shape else 0
    expected: tuple[str, list[int]] = "F32", [width]
    if part == "total":
        expected = "F32", [width, width]
    elif part == "sample":
        expected = kind if kind in FLOATS else "F32", [shape[0] if shape else 0, width]
    elif part == "counts":
        expected = "I64", [2 * BINS]
    partner = {"total": "magnitude", "lo": "hi", "sample": "magnitude"}.get(part)
    other = f"{owner}.{partner}"
    is_alone = partner is None or other not in file.keys()  # noqa: SIM118
    if (kind, shape) != expected or not (is_alone or _header(file, other)[1][-1:] == [width]):
        raise ValueError(
            f"{path}: {name} is {kind} {shape}, which no such tensor is: collect the statistics "
            "anew."
        )


def _header(file: Any, name: str) -> tuple[str, list[int]]:
    """Return type and shape of a stored tensor; the type as safetensors spells it."""
    entry = file.get_slice(name)
    return entry.get_dtype(), list(entry.get_shape())


class _LazyMapping(Mapping[str, T]):
    """Values by name that are read from a file on each access."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
