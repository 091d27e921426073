"""Files of a checkpoint: written beside their place and renamed, read tensor by tensor."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NATIVE = "model_state_dict.pth"


@contextmanager
def fresh_directory(path: str | Path, overwrite: bool = False, needed: int = 0) -> Iterator[Path]:
    """Give a new directory to write to, which takes the place of ``path`` when all went well.

    Args:
        path: Where the directory goes. Missing parents are made.
        overwrite: Whether an existing, non-empty directory may be replaced.
        needed: Bytes that will be written.

    Raises:
        FileExistsError: The directory exists and is not empty.
        OSError: The disk has less room than needed.
    """
    target = Path(path).resolve()
    check_vacant(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(
            f"{target.parent} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} GB will be "
            "written: make room, or choose another directory."
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        _grant_default_modes(partial)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_vacant(path: str | Path, overwrite: bool = False) -> None:
    """Raise if ``path`` holds something that must not be replaced.

    Raises:
        FileExistsError: It is a file, or a directory that is not empty.
    """
    target = Path(path)
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() and not (overwrite and target.is_dir()):
        raise FileExistsError(
            f"{target} already exists: choose another directory, remove it, or pass overwrite=True."
        )


def _grant_default_modes(directory: Path) -> None:
    """Give files and directory the access of newly made ones, not that of temporary ones."""
    probe = directory / ".probe"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for file in directory.iterdir():
        file.chmod(mode)
    directory.chmod(mode | (mode & 0o444) >> 2)


def _replace(partial: Path, target: Path) -> None:
    """Move ``partial`` to ``target``; what was there goes only once the new one stands."""
    if not target.exists():
        partial.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    target.rename(old / target.name)
    try:
        partial.rename(target)
    except BaseException:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def write_tensors(
    tensors: dict[str, torch.Tensor], directory: Path, max_shard_size: str | int
) -> None:
    """Write tensors as safetensors, in several files with an index above ``max_shard_size``."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    plan = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    for name, keys in _progress(plan.filename_to_tensors.items(), "writing"):
        shard = {key: tensors[key].detach().cpu().contiguous() for key in keys}
        save_file(shard, directory / name, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(directory / INDEX, index)


class Stored(NamedTuple):
    """Where a tensor lies and what it is, as far as the header of its file says."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


# Types as safetensors spells them.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointReader:
    """Tensors of a checkpoint directory, or of one file in it, read one by one.

    Raises:
        FileNotFoundError: There are no tensors, or a file of the index is missing.
        ValueError: A file is damaged.
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, Stored] = {}
        for name in [file] if file else self._files():
            for key, entry in self._header(name):
                if key in self.entries:
                    raise ValueError(f"{self.directory}: {key} is there twice, again in {name}.")
                self.entries[key] = entry

    def _files(self) -> list[str]:
        index = self.directory / INDEX
        if index.is_file():
            files = _indexed_files(index)
        elif (self.directory / SINGLE).is_file():
            files = [SINGLE]
        else:
            files = sorted(f.name for f in self.directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.directory} has no *.safetensors files.")
        for file in files:
            # Names come from a file: they must not lead out of the directory.
            if Path(file).name != file or not (self.directory / file).is_file():
                raise FileNotFoundError(f"{self.directory} lacks {file}, which its index names.")
        return files

    def _header(self, file: str) -> Iterator[tuple[str, Stored]]:
        with self._open(file) as opened:
            self._check_names(file)
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                entry = opened.get_slice(key)
                dtype = _DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise ValueError(f"{file}: {key} has the unknown type {entry.get_dtype()}.")
                yield key, Stored(file, tuple(entry.get_shape()), dtype)

    def _check_names(self, file: str) -> None:
        """Raise if a sound header has a name twice: readers differ in which they take."""
        with (self.directory / file).open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            _parse(opened.read(size), self.directory / file)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.directory / file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.directory / file} is damaged or not a safetensors file ({error}): "
                "copy or export it again."
            ) from None

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        with self._open(self.entries[key].file) as opened:
            found: torch.Tensor = opened.get_tensor(key)
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors, file by file."""
        by_file: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            by_file.setdefault(entry.file, []).append(key)
        for file, keys in _progress(by_file.items(), "reading"):
            with self._open(file) as opened:
                for key in keys:
                    yield key, opened.get_tensor(key)


class NativeReader:
    """Tensors of a ``model_state_dict.pth``, read without running anything it contains.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged, or holds something other than tensors.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / NATIVE
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no {NATIVE}.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ValueError(
                f"{path} is damaged, or holds more than plain tensors, which could run code and is "
                "never loaded: export the model again."
            ) from error
        values = state.values() if isinstance(state, dict) else [None]
        if not all(isinstance(v, torch.Tensor) for v in values):
            raise ValueError(f"{path} holds something other than tensors.")
        self._state: dict[str, torch.Tensor] = dict(state)
        self.entries = {
            key: Stored(NATIVE, tuple(value.shape), value.dtype)
            for key, value in self._state.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return self._state[key]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        yield from self._state.items()


def _indexed_files(index: Path) -> list[str]:
    data = read_json(index)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names.")
    return sorted(set(files.values()))


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is not JSON, or has a name twice.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    return _parse(Path(path).read_bytes(), path)


def _parse(data: bytes, path: str | Path) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def _progress(items: Any, what: str) -> Any:
    from tqdm import tqdm

    items = list(items)
    return tqdm(items, desc=what, delay=1.0, disable=None, leave=False) if len(items) > 1 else items
