"""Recognition of a checkpoint: the kind of its files, and the tool that it was written for.

A directory that holds a model in several containers, as ``--model_export`` can write it, is read as
the first of them in ``CONTAINERS``; give the file to read another one. A directory that has two
checkpoints which share a ``config.json`` is refused.

Names and headers are read, which needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quark.torch.export.checkpoint.auto_round import AUTO_ROUND, packing_refusal
from quark.torch.export.checkpoint.config_json import CONFIG, SECTION
from quark.torch.export.checkpoint.file_versions import unchanged
from quark.torch.export.containers.base import Container, get_container
from quark.torch.export.containers.registry import CONTAINERS
from quark.torch.export.formats.base import ExportFormat, format_class
from quark.torch.export.formats.registry import FORMATS


def recognize_container(path: str | Path) -> Container:
    """Return the container that a file or directory is.

    Raises:
        FileNotFoundError: It does not exist, or is none that is known.
        ValueError: It is a directory with two checkpoints, of which one may be outdated.
    """
    path = Path(path)
    containers = [get_container(name) for name in CONTAINERS]
    matches = [c for c in containers if c.holds(path)]
    if not matches:
        kinds = ", ".join(c.title for c in containers)
        is_there = "is of no known kind" if path.exists() else "does not exist"
        problem = f"has no {CONFIG}" if path.is_dir() else is_there
        raise FileNotFoundError(f"{path} {problem}: give a checkpoint ({kinds}).")
    sharing = [c for c in matches if c.has_config_json]
    if len(sharing) > 1:
        raise ValueError(
            f"{path} holds two checkpoints, {' and '.join(c.title for c in sharing)}, which may "
            "differ: move one of them to a directory of its own."
        )
    return matches[0]


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Check that the files of a checkpoint do not change while it is read.

    The name of the checkpoint is put before the message of a ``ValueError`` that lacks it.

    Raises:
        ValueError: Another process has changed a file.
    """
    try:
        with unchanged(source):
            yield
    except ValueError as error:
        if re.search(rf"(?<![\w.]){re.escape(str(source))}(?!\w)", str(error)):
            raise
        raise ValueError(f"{source}: {error}") from error


def recognize_format(config_json: dict[str, Any], where: str) -> ExportFormat:
    """Return the format of the checkpoint that a ``config.json`` describes.

    Args:
        config_json: What ``read_config_json`` returns.
        where: Name of the file, for messages.

    Raises:
        ValueError: It has no ``quantization_config``, or one of an unknown method, or one with
            unknown keys or names; or one of auto-round with a packing that is not read.
    """
    section = config_json.get(SECTION)
    if not isinstance(section, dict):
        raise ValueError(
            f"{where} has no {SECTION}: this is not a quantized checkpoint. "
            "Quantize the model first ('quark quantize')."
        )
    method = section.get("quant_method", "quark")
    if method == AUTO_ROUND:  # ``read_config_json`` translates the packings that are read
        raise ValueError(f"{where}: {packing_refusal(section)}")
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(
            f"{where}: quant_method={method!r} is unknown (known: {', '.join(FORMATS)})."
        )
    try:
        return format_class(method).from_section(section)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"{where}: the {SECTION} of {method!r} is malformed ({error}).") from None
