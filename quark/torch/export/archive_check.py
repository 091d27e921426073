"""Check of archives of ``torch.export``, so that a file of others can be opened.

``torch.export.load`` unpickles tensors, evaluates symbolic sizes as Python, and takes any function
of torch by its name. So an archive is read here first: pickles may hold tensors only, and each name
and expression is compared with what graphs consist of. The checked contents are packed again, and
torch opens the result.
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Members that torch reads, by the end of their path: text, raw tensors.
_PLAIN = re.compile(
    r"(archive_format|archive_version|byteorder|version|serialization_id"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+)"
)
_SYMPY = (
    "Symbol Integer Rational Float Add Mul Pow Equality Unequality LessThan StrictLessThan "
    "GreaterThan StrictGreaterThan positive nonnegative nonzero integer real precision "
    "Max Min Mod PythonMod FloorDiv CeilDiv CleanDiv ModularIndexing IntTrueDiv FloatTrueDiv "
    "ToFloat TruncToInt Identity Eq Ne Le Lt Ge Gt And Or Not True False oo int_oo"
)
_EXPRESSION = re.compile(
    rf"(\b\d+(\.\d+)?|\b[a-z]{{1,3}}\d+\b|'[a-z]{{1,3}}\d+'|\b({'|'.join(_SYMPY.split())})\b"
    r"|[-+*/%(),<>=!&|~ ])*"
)
_NAME = re.compile(r"[\w.]*")
_ARITHMETIC = (
    "getitem add sub mul floordiv truediv mod pow neg pos eq ne lt le gt ge and_ or_ not_ xor"
)
_TARGET = re.compile(
    r"torch\.ops\.(aten|quark|quantized_decomposed)\.(?!from_file)\w+\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    rf"|_operator\.({'|'.join(_ARITHMETIC.split())})"
    r"|torch\.sym_\w+|torch\._sym_\w+|math\.\w+"
)
_OTHER = re.compile(r"[^()`\n]*")
# Key of a string -> what it may be. Arguments of operators ("as_string") may be anything.
_RULES = {
    "target": _TARGET,
    "expr_str": _EXPRESSION,
    **dict.fromkeys(("name", "as_name", "forward_arg_names"), _NAME),
}
# Errors of zipfile about archives that are damaged, compressed in unknown ways or encrypted.
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    EOFError,
    OverflowError,
)
_METADATA = ("nn_module_stack", "stack_trace")  # of a node; nothing is evaluated of these


def checked_archive(path: str | Path) -> io.BytesIO:
    """Return the contents of an archive that ``torch.export.save`` wrote, which are safe to load.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: It is no archive of torch.export, or has contents that could run code. The
            message names them.
    """
    result = io.BytesIO()
    try:
        with (
            zipfile.ZipFile(path) as source,
            zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as target,
        ):
            _copy_checked(source, target, Path(path).stat().st_size)
    except _UNREADABLE as error:
        raise ValueError(
            f"{path} is no archive of torch.export.save, or it is damaged: {error}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    result.seek(0)
    return result


def _copy_checked(source: zipfile.ZipFile, target: zipfile.ZipFile, size: int) -> None:
    """Copy the members of an archive, each of them checked.

    Args:
        source: The archive.
        target: Archive to write.
        size: Bytes of the archive. Members are not compressed, so together they have no more.

    Raises:
        ValueError: It is no archive of torch.export, or a member could run code.
    """
    names = source.namelist()
    if len(set(names)) < len(names) or not any(name.endswith(".json") for name in names):
        raise ValueError("This is no archive of torch.export.save.")
    members = source.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED for m in members):
        raise ValueError("The archive is compressed; torch.export.save does not compress.")
    if sum(m.file_size for m in members) > size:
        raise ValueError(f"The members have more than the {size} bytes of the file: it is damaged.")
    pickled = set(_pickled_tensors(source, names))
    for name in names:
        try:
            content = _checked(name, source.read(name), name in pickled)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
        target.writestr(name, content)


def _pickled_tensors(source: zipfile.ZipFile, names: list[str]) -> Iterator[str]:
    """Iterate over the members that the lists of weights and constants declare to be pickles.

    Raises:
        ValueError: A list is malformed.
    """
    for name in names:
        if not name.endswith("_config.json"):
            continue
        try:
            entries = _parse_json(source.read(name))["config"].values()
            pickles = [(e["path_name"], e["use_pickle"]) for e in entries]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(f"{name} is no list of tensors: the archive is damaged.") from None
        folder = name.rpartition("/")[0]
        yield from (f"{folder}/{path}" for path, is_pickled in pickles if is_pickled)


def _parse_json(content: bytes) -> Any:
    """Return a value of JSON.

    Raises:
        ValueError: It is none, or nested too deeply.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("is no JSON: the archive is damaged.") from None


def _checked(name: str, content: bytes, is_pickled: bool) -> bytes:
    """Return the contents of a member, without what could run code.

    Raises:
        ValueError: Something else could. The message continues the name of the member.
    """
    _, _, inner = name.partition("/")
    if is_pickled or inner.endswith(".pt"):
        if content:
            _check_pickle(content)
        return content
    if inner.endswith(".json"):
        data = _parse_json(content)
        _check_json(data, "")
        return json.dumps(data).encode()
    if not _PLAIN.fullmatch(inner) and not _PLAIN.fullmatch(inner.removeprefix(".data/")):
        raise ValueError("is neither a tensor nor part of a graph: it could run code.")
    return content


def _check_pickle(content: bytes) -> None:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # whatever a damaged pickle raises
        raise ValueError("is a pickle of more than tensors: it could run code.") from None


def _check_json(data: Any, key: str) -> None:
    """Check the strings of a JSON value, and remove the metadata and guards that are not needed."""
    if isinstance(data, dict):
        if isinstance(data.get("guards_code"), list):
            data["guards_code"] = []  # Python, about the shapes of inputs
        if isinstance(data.get("metadata"), dict):
            data["metadata"] = {k: v for k, v in data["metadata"].items() if k in _METADATA}
        for name, value in data.items():
            if name not in ("metadata", "as_string"):
                _check_string(name, "name")
                _check_json(value, name)
    elif isinstance(data, list):
        for value in data:
            _check_json(value, key)
    elif isinstance(data, str):
        _check_string(data, key)


def _check_string(text: str, key: str) -> None:
    rule = _RULES.get(key, _OTHER)
    if rule.fullmatch(text) is None:
        raise ValueError(f"has the {key or 'text'} {text[:80]!r}, which graphs do not have.")
