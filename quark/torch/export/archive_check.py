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
import zipfile
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
        source = zipfile.ZipFile(path)
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is no archive of torch.export.save.") from None
    with source, zipfile.ZipFile(result, "w", zipfile.ZIP_STORED) as target:
        names = source.namelist()
        if len(set(names)) < len(names) or not any(name.endswith(".json") for name in names):
            raise ValueError(f"{path} is no archive of torch.export.save.")
        pickled = set(_pickled_tensors(source, names))
        for name in names:
            try:
                content = _checked(name, source.read(name), name in pickled)
            except ValueError as error:
                raise ValueError(f"{path}: {name} {error}") from None
            target.writestr(name, content)
    result.seek(0)
    return result


def _pickled_tensors(source: zipfile.ZipFile, names: list[str]) -> Iterator[str]:
    """Iterate over the members that the lists of weights and constants declare to be pickles."""
    for name in names:
        if name.endswith("_config.json"):
            folder = name.rpartition("/")[0]
            entries = json.loads(source.read(name)).get("config", {})
            yield from (f"{folder}/{e['path_name']}" for e in entries.values() if e["use_pickle"])


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
        data = json.loads(content)
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
