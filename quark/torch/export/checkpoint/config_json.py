"""What a checkpoint says of itself, in ``config.json`` or in the file that older tools wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark.torch.export.checkpoint.files import NATIVE, read_json

CONFIG, SECTION = "config.json", "quantization_config"
# File beside config.json -> method it is of where it does not say: AutoGPTQ, AutoAWQ.
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of AutoAWQ
_TELLING = ("quant_method", "bits", "group_size", "sym", "zero_point", "checkpoint_format")


def read_description(directory: str | Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint, quantization settings of a file beside it included.

    AutoGPTQ wrote them to ``quantize_config.json`` alone, and AutoAWQ to ``quant_config.json``.

    Args:
        directory: Directory of a model, quantized or not.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: A file is damaged, or two of them disagree.
    """
    path = Path(directory) / CONFIG
    found = _read_object(path)
    for name, method in _BESIDE.items():
        if not (path.parent / name).is_file():
            continue
        beside = _read_object(path.parent / name)
        beside = {_NAMES.get(k, k): value for k, value in beside.items() if value is not None}
        section = found.get(SECTION)
        if section is None:
            found[SECTION] = {"quant_method": method, **beside}
        elif isinstance(section, dict):
            _check_agreement(section, beside, path.parent, name)
    return found


def is_for_transformers(directory: str | Path) -> bool:
    """Whether Transformers finds all that a directory says of its weights.

    It takes neither the native format nor settings beside ``config.json``: weights that it does
    not know would be left as they are initialized.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: A file is damaged, or two of them disagree.
    """
    described = read_description(directory)
    said = _read_object(Path(directory) / CONFIG)
    return not (Path(directory) / NATIVE).is_file() and said.get(SECTION) == described.get(SECTION)


def _read_object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not describe a model: expected an object.")
    return found


def _check_agreement(
    section: dict[str, Any], beside: dict[str, Any], directory: Path, name: str
) -> None:
    """Raise if two files tell one thing differently."""
    for key in _TELLING:
        if key in section and key in beside and section[key] != beside[key]:
            raise ValueError(
                f"{directory}: {SECTION} of {CONFIG} has {key}={section[key]!r}, but {name} has "
                f"{beside[key]!r}. Remove the one that is not true of the weights."
            )
