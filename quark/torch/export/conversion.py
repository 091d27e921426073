"""Conversion of a checkpoint to another format or container: the same codes, or an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quark.torch.digests import check_unchanged
from quark.torch.export.api import ModelExporter
from quark.torch.export.containers.base import Container, ExportSettings, get_container
from quark.torch.export.containers.registry import SAFETENSORS, conversion_targets
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import reading, recognize_container
from quark.torch.export.verification import Verdict
from quark.torch.files import check_space, check_vacant, size_of
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.value_types import check_types


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    overwrite: bool = False,
    verify: bool = False,
    trust_remote_code: bool = False,
    check_digests: bool = False,
) -> Verdict | None:
    """Write a quantized checkpoint in another format, with the same codes and scales.

    Nothing is rounded anew: if the other format cannot hold the checkpoint, an error is raised
    before tensors are read. Only scales in GGUF are always float16.

    Args:
        source: Directory of a checkpoint, or a file, of any container that is read.
        target: Directory to write.
        to: Format of safetensors (a name of ``FORMATS``), or another container (a name of
            ``CONTAINERS``).
        overwrite: Whether an existing directory may be replaced.
        verify: Whether the result is opened again and compared before it takes its place.
        trust_remote_code: Passed to Transformers.
        check_digests: Whether files of the source are first compared with the digests that were
            written with them.

    Returns:
        The result of the verification, None without.

    Raises:
        FileExistsError: The target is in use.
        FileNotFoundError: Files of the source are missing.
        ImportError: A package is missing.
        TypeError: An option has a value of another type.
        ValueError: The source is damaged, or the format unknown or unable to hold it.
    """
    check_types(bool, overwrite=overwrite, verify=verify)
    check_types(bool, trust_remote_code=trust_remote_code, check_digests=check_digests)
    source, target = Path(source), Path(target)
    to = one_of(to, conversion_targets(), "to")
    check_apart(source, target)
    check_kinds(source, to)
    origin = recognize_container(source)
    container = _container_of(to)
    container.check_installed()
    check_vacant(target, overwrite)
    if check_digests:
        check_unchanged(source)
    with reading(source):
        loading = origin.open(source, trust_remote_code)
    settings = ExportSettings(custom_mode=to if to in FORMATS else "quark", tokenizer_path=source)
    container.check_writable(loading.model, settings)
    check_space(target, size_of(loading.outline))
    settings = replace(settings, tokenizer=origin.tokenizer(source))
    exporter = ModelExporter(None, target, overwrite, verify=verify)
    with reading(source):
        model = loading.fill()
    exporter.export(container.name, model, settings)
    return exporter.verdict


def check_apart(source: Path, target: Path) -> None:
    """Check that the directory to write is not that of the checkpoint, and not around it.

    Raises:
        ValueError: It is.
    """
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"{target} holds the checkpoint itself: choose another directory.")


def check_kinds(source: Path, to: str) -> None:
    """Check that the checkpoint is not yet what it is converted to.

    Raises:
        ValueError: It is of a container with one layout, and would be written to the same.
    """
    container = _container_of(to)
    if recognize_container(source).name == container.name and not container.has_formats:
        raise ValueError(f"{source} is {container.title} already.")


def _container_of(to: str) -> Container:
    """Return the container that is written for a format or a container, by its name."""
    return get_container(SAFETENSORS if to in FORMATS else to)
