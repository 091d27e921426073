"""Calibration data of ``quark quantize``: windows of text, or samples for a processor."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quark.cli import models
from quark.cli.console import wrong
from quark.cli.predicted_text import name_of_input, reads_text
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.evaluation.samples import Kind

logger = logging.getLogger(__name__)

# What AutoProcessor, AutoImageProcessor and AutoFeatureExtractor read beside a tokenizer.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


class ProcessorFiles:
    """The tokenizer of a model, and the files of its processor.

    Args:
        tokenizer: The tokenizer, or None.
        directory: Directory of the model.
    """

    def __init__(self, tokenizer: Any | None, directory: Path) -> None:
        self.tokenizer, self.directory = tokenizer, directory

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the tokenizer, and copy the files of the processor that are not there yet."""
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
        for name in PROCESSOR_FILES:
            source, target = self.directory / name, Path(directory) / name
            if source.is_file() and not target.exists():
                shutil.copyfile(source, target)


def kind_of_dataset(request: Request, outline: nn.Module | None) -> Kind | None:
    """Return the kind of the samples of ``--dataset``; None for text.

    Raises:
        typer.BadParameter: It cannot be read, or is text for a model that does not read text.
    """
    from quark.torch.evaluation.samples import kind_of_source

    try:
        kind = None if request.dataset is None else kind_of_source(request.dataset)
    except (OSError, ValueError) as error:
        raise wrong("--dataset", str(error)) from None
    if kind is None and not reads_text(outline):
        raise wrong(
            "--dataset",
            f"{type(outline).__name__} reads {name_of_input(outline)}, not text. Give a directory "
            "of images or audio, or a .jsonl of messages that name such files. If the model has no "
            "processor for these, call ModelQuantizer in Python with its own batches.",
        )
    return kind


def warn_of_unread_data(request: Request) -> None:
    """Warn of flags of calibration data where no data is read."""
    flags = [f"--{name}" for name in ("dataset", "num_calib_data") if name in request.given]
    if flags:
        logger.warning(
            "%s: no effect, since %s. Algorithms such as --quant_algo gptq read data.",
            ", ".join(flags),
            "the statistics replace data" if request.statistics else "this scheme needs no data",
        )


def describe(request: Request, kind: Kind | None, length: int) -> str:
    """Return the calibration data in words, for the plan."""
    if kind is None:
        source = request.dataset or models.CALIBRATION
        return f"up to {request.num_calib_data} windows of {length} tokens: {source}"
    what = {"images": "images", "audio": "sounds", "messages": "conversations"}[kind]
    return f"up to {request.num_calib_data} {what}: {request.dataset}"


def check_texts(request: Request, is_calibrated: bool) -> None:
    """Check that the texts of a request exist and can be read, without reading them.

    Raises:
        typer.BadParameter: One cannot.
    """
    if is_calibrated:
        models.check_text(request.dataset, "--dataset")
    if not request.skip_evaluation:
        models.check_text(request.eval_data, "--eval_data")


def find_tokenizer(request: Request, is_calibrated: bool) -> Any:
    """Return the tokenizer of the model; None if it has none and no text is read.

    Args:
        request: The flags.
        is_calibrated: Whether windows of text calibrate the model.

    Raises:
        typer.BadParameter: It is missing, or has no chat template for the conversations of
            ``--eval_data``.
    """
    try:
        tokenizer = models.load_tokenizer(
            request.model_dir, "--model_dir", request.trust_remote_code
        )
    except typer.BadParameter as error:
        if is_calibrated:
            raise
        if not request.skip_evaluation:
            error.message += " Or give --skip_evaluation: this scheme needs no text."
            raise
        return None
    if not request.skip_evaluation:
        models.check_template(request.eval_data, "--eval_data", tokenizer)
    return tokenizer


def find_reader(request: Request, kind: Kind | None, tokenizer: Any) -> Any:
    """Return what reads the calibration data: the tokenizer, or the processor of the model.

    Args:
        request: The flags.
        kind: Result of ``kind_of_dataset``.
        tokenizer: Tokenizer of the model; None where ``kind`` is not.

    Raises:
        typer.BadParameter: The model has no processor, or no chat template for conversations.
    """
    reader = tokenizer
    if kind is not None:
        remote = request.trust_remote_code
        reader = load_processor(request.model_dir, "--model_dir", remote)
    models.check_template(request.dataset, "--dataset", reader)
    return reader


def load_processor(directory: Path, flag: str, trust_remote_code: bool = False) -> Any:
    """Return the processor of a directory, image processor and feature extractor included.

    An audio model without a tokenizer has a feature extractor, whatever its type usually has.

    Raises:
        typer.BadParameter: The directory has none, or a package that it needs is missing.
    """
    from transformers import AutoFeatureExtractor, AutoProcessor

    models.quiet_transformers()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        return AutoProcessor.from_pretrained(directory, **options)
    except Exception as error:  # as in load_tokenizer: some processors hold a tokenizer
        first = str(error).strip().split("\n")[0]
        if not models.has_tokenizer(directory):
            with suppress(Exception):
                return AutoFeatureExtractor.from_pretrained(directory, **options)
        raise wrong(
            flag,
            f"{directory} has no processor that can be loaded ({first}). Copy its files, such as "
            "preprocessor_config.json, to this directory.",
        ) from None


def read_batches(request: Request, kind: Kind | None, reader: Any, length: int) -> list[Any]:
    """Return the calibration batches of a request.

    Args:
        request: The flags.
        kind: Result of ``kind_of_dataset``.
        reader: Result of ``find_reader``.
        length: Tokens per window of text.

    Raises:
        typer.BadParameter: The data cannot be read, or does not fit the processor.
    """
    import torch

    from quark.torch.evaluation.samples import make_batches, read_samples

    if kind is None:
        windows = models.text_windows(
            request.dataset, "--dataset", reader, length, request.num_calib_data, False
        )
        return [*torch.split(windows, request.batch_size)]
    assert request.dataset is not None
    try:
        samples = read_samples(request.dataset, request.num_calib_data)
        return make_batches(samples, reader, length)
    except (ImportError, OSError, ValueError) as error:
        raise wrong("--dataset", f"{error}.".replace("..", ".")) from None
