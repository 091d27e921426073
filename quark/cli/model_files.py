"""Where a model is, and what it is: a directory, a GGUF file, or a name on the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.console import stage, wrong
from quark.cli.missing_model import without_config

if TYPE_CHECKING:
    from quark.torch.export.containers.base import Container

GRAPH_SUFFIX = ".pt2"
PYTHON_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # module:function
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Other containers of the same weights on the Hub.
NOT_LOADED = ["original/*", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]


def find_model(given: Path, flag: str, revision: str | None = None) -> Path:
    """Return the directory or GGUF file of a model; a model on the Hub is downloaded.

    Args:
        given: Directory or GGUF file, directory with one GGUF file, or OWNER/NAME on the Hub.
        flag: Flag of the value, for the error.
        revision: Revision on the Hub.

    Raises:
        typer.BadParameter: Neither a directory nor a model on the Hub has that name; a directory
            has several GGUF files; or it is a graph, or a Python function that builds a model.
    """
    is_entry = PYTHON_ENTRY.fullmatch(str(given)) is not None and not given.exists()
    if given.suffix == GRAPH_SUFFIX or is_entry:
        raise wrong(
            flag,
            f"{given} is a graph, or builds one: only 'quark quantize' takes graphs. It computes "
            "ranges and applies algorithms with --dataset, without statistics. Give the directory "
            "of a language model here.",
        )
    if (file := find_gguf(given, flag)) is not None:
        return file
    if not is_hub_name(given):
        return given
    from huggingface_hub import snapshot_download

    try:
        with stage(f"finding {given}"):
            directory = snapshot_download(
                given.as_posix(), revision=revision, ignore_patterns=NOT_LOADED
            )
    except (OSError, ValueError) as error:  # includes errors of the Hub and of the network
        first = str(error).strip().split("\n")[0]
        raise wrong(
            flag,
            f"there is no directory {given}, and no model of that name can be reached on the "
            f"Hugging Face Hub ({first}). Give the directory of a model.",
        ) from None
    return Path(directory)


def is_hub_name(given: Path) -> bool:
    """Whether a path is no directory or file but can be a name on the Hub."""
    return not given.exists() and HUB_NAME.fullmatch(given.as_posix()) is not None


def find_gguf(given: Path, flag: str) -> Path | None:
    """Return the GGUF file that a path is, or that is in a directory without ``config.json``.

    Raises:
        typer.BadParameter: A directory has several.
    """
    from quark.torch.export.containers.gguf import Gguf

    container = Gguf()
    if not (given.exists() and container.holds(given)):
        return None
    try:
        return container.file(given)
    except ValueError as error:
        raise wrong(flag, str(error)) from None


def find_container(path: Path, flag: str) -> Container:
    """Return the container that a path is.

    Raises:
        typer.BadParameter: It is no checkpoint, or two.
    """
    from quark.torch.export.containers.recognition import recognize_container

    try:
        return recognize_container(path)
    except (FileNotFoundError, ValueError) as error:
        if any((path / name).is_file() for name in ("adapter_config.json", "model_index.json")):
            raise wrong(flag, without_config(path)) from None
        raise wrong(flag, str(error)) from None


def check_quantized(directory: Path, flag: str) -> None:
    """Check that a checkpoint says how it was quantized, in codes that are read.

    Raises:
        ValueError: A file is damaged.
        typer.BadParameter: It is the checkpoint of a float model, or none, or of its blocks only
            values are read.
    """
    container = find_container(directory, flag)
    if container.is_quantized(directory) and container.has_codes(directory):
        return
    found = "is not a quantized checkpoint"
    if container.contents(directory).summary.layers:
        found = "has blocks of which values alone are read"
    raise wrong(
        flag,
        f"{directory} {found}. Quantize the model first: "
        f"quark quantize --model_dir {directory} --output_dir OUT --quant_scheme int4_wo_32.",
    )
