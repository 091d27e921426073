"""Models, tokenizers and text for the verbs. torch and transformers are imported on use."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import format_bits, stage, wrong
from quark.cli.missing_model import without_config, without_place
from quark.cli.model_files import find_gguf

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.headers import Entry

CALIBRATION = "text of this package"
EVALUATION = "held-out docstrings of the standard library"
CHARACTERS_PER_TOKEN = 8  # of English text in any vocabulary, at most
logger = logging.getLogger("quark")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_COPY_TOKENIZER = (
    "Copy the files of the tokenizer from the original model to this directory "
    "(tokenizer.json, tokenizer_config.json)."
)


def read_config(directory: Path, flag: str) -> dict[str, Any]:
    """Return the contents of the ``config.json`` of a model, or those that a GGUF file stands for.

    Raises:
        typer.BadParameter: The path is not that of a model.
        ValueError: A file is damaged.
    """
    from quark.torch.export.checkpoint.config_json import read_config_json

    if (file := find_gguf(directory, flag)) is not None:
        from quark.torch.export.gguf.matching import read_gguf_config

        with stage(f"reading {file.name}"):
            described: dict[str, Any] = read_gguf_config(file).to_dict()
        return described
    if directory.is_file():
        raise wrong(flag, f"{directory} is a file. Give its directory: {directory.parent}")
    if not directory.is_dir():
        raise wrong(flag, without_place(directory))
    try:
        return read_config_json(directory)
    except FileNotFoundError:
        raise wrong(flag, without_config(directory)) from None


def load_model(
    directory: Path,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
    max_memory: int | None = None,
    in_float: bool = False,
    runtime: str = "exact",
) -> nn.Module:
    """Return the model of a directory, float or quantized, in evaluation mode.

    Args:
        directory: Directory of the model.
        dtype: Data type of the loaded model, or ``auto`` for the stored type.
        device: Device of the loaded model.
        trust_remote_code: Whether Python code from the directory may run.
        attention: Implementation of attention; None for the default of Transformers.
        max_memory: Bytes that this process may take; see ``load_checkpoint``.
        in_float: Whether a quantized model is dequantized.
        runtime: How quantized layers compute; see ``set_runtime``.
    """
    from quark.torch.export.recognition import load_checkpoint, load_in_float

    quiet_transformers()
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if runtime != "exact":
        options["runtime"] = runtime
    load = load_in_float if in_float else load_checkpoint
    return load(
        directory, dtype, trust_remote_code, max_memory=max_memory, device=device, **options
    ).eval()


def check_runtime(runtime: str, max_memory: int | None) -> None:
    """Check the value of ``--runtime``.

    Raises:
        typer.BadParameter: It is unknown, or does not go with ``--max_memory``.
    """
    from quark.torch.quantization.nn.runtime import check_runtime

    try:
        check_runtime(runtime)
    except ValueError as error:
        raise wrong("--runtime", str(error)) from None
    if runtime != "exact" and max_memory is not None:
        raise wrong("--runtime", f"{runtime} does not go with --max_memory: give one of them.")


def check_method(directory: Path, described: dict[str, Any], flag: str) -> bool:
    """Check that the method of a quantized model is read; return whether the model has one.

    Args:
        directory: Directory of the model, or its GGUF file.
        described: Result of ``read_config``.
        flag: Flag of the directory, for the error.

    Raises:
        typer.BadParameter: The model is quantized by a method that is not read.
    """
    from quark.torch.export.checkpoint.config_json import CONFIG, SECTION
    from quark.torch.export.recognition import recognize_format

    if find_gguf(directory, flag) is not None:
        return True
    if not described.get(SECTION):
        return False
    try:
        recognize_format(described, str(directory / CONFIG))
    except ValueError as error:
        raise wrong(flag, f"{error} Give the float model, or one of a known method.") from None
    return True


def describe_source(directory: Path, described: dict[str, Any], flag: str) -> str:
    """Return how the weights of a quantized model are stored, "" for a float model.

    A warning says that quantizing a quantized model loses accuracy twice.

    Args:
        directory: Directory of the model, or its GGUF file.
        described: Result of ``read_config``.
        flag: Flag of the directory, for the error.

    Raises:
        typer.BadParameter: The model is quantized by a method that is not read.
    """
    from quark.torch.export.recognition import read_contents

    if not check_method(directory, described, flag):
        return ""
    summary = read_contents(directory).summary
    if not summary.layers:
        return ""
    weights = dict.fromkeys(scheme.scheme.weight for scheme in summary.schemes())
    source = ", ".join(filter(None, weights)) or "weights in float"
    bits = summary.bits_per_weight
    size = "" if bits is None else f", {format_bits(bits)} bits per weight"
    logger.warning(
        "The model is quantized already (%s%s): quantizing it again adds to that loss. "
        "Give the original model if you have it.",
        source,
        size,
    )
    return source


def load_libraries() -> None:
    """Import PyTorch and Transformers as a step of its own, which takes seconds once."""
    if "transformers.modeling_utils" not in sys.modules:
        with stage("loading PyTorch and Transformers", spinner=True):
            import transformers.modeling_utils  # noqa: F401 - which imports the slow parts


def check_model(directory: Path, trust_remote_code: bool = False, digests: bool = False) -> None:
    """Check the headers of a model against its configuration, before any other work.

    Args:
        directory: Directory of the model.
        trust_remote_code: Whether Python code from the directory may run.
        digests: Whether to compare its files with their digests too.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file has changed, or tensors do not fit the model.
    """
    load_libraries()
    from quark.torch.export.recognition import check_checkpoint

    quiet_transformers()
    with stage(f"checking {directory.name}"):
        check_checkpoint(directory, trust_remote_code, digests)


def check_files(directory: Path, digests: bool = False) -> None:
    """Check the files of a model that Transformers cannot build, before any other work.

    Args:
        directory: Directory of the model.
        digests: Whether to compare its files with their digests too.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged or has changed.
    """
    from quark.torch.digests import check_unchanged

    read_entries(directory)
    if digests:
        check_unchanged(directory)


def load_tokenizer(directory: Path, flag: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a directory, or that of a GGUF file.

    Raises:
        typer.BadParameter: There is no tokenizer.
        ValueError: Its files cannot be loaded.
    """
    from transformers import AutoTokenizer

    quiet_transformers()
    if (file := find_gguf(directory, flag)) is not None:
        from quark.torch.export.gguf.tokenizer import load_tokenizer as load_gguf_tokenizer

        try:
            return load_gguf_tokenizer(file)
        except ValueError as error:
            raise wrong(flag, str(error)) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # such as TypeError: a class of tokenizers joins a path with None
        first = str(error).strip().split("\n")[0]
        if not has_tokenizer(directory):
            raise wrong(flag, f"{directory} has no tokenizer. {_COPY_TOKENIZER}") from None
        raise ValueError(
            f"{directory} has no tokenizer that can be loaded ({first}). {_COPY_TOKENIZER}"
        ) from None
    files = ["tokenizer_config.json", *tokenizer.vocab_files_names.values()]
    if not any((directory / file).is_file() for file in files):
        # Transformers returned an empty tokenizer of this type of model
        raise wrong(flag, f"{directory} has no tokenizer. {_COPY_TOKENIZER}")
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a file of a tokenizer."""
    return any((directory / file).is_file() for file in _TOKENIZER_FILES)


def quiet_transformers() -> None:
    """Show errors of Transformers alone, and no progress."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Transformers may have been imported, and configured its log, before.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def check_text(source: str | None, flag: str) -> None:
    """Check that a text may exist and can be read, without reading it.

    Raises:
        typer.BadParameter: It cannot.
    """
    from quark.torch.evaluation.datasets import check_named, split_shares
    from quark.torch.evaluation.samples import kind_of_source

    try:
        for name, _ in [] if source is None else split_shares(source):
            if kind_of_source(name) != "messages":  # which need no library
                check_named(name)
    except (ImportError, OSError, ValueError) as error:
        raise wrong(flag, str(error)) from None


def check_template(source: str | None, flag: str, reader: Any) -> None:
    """Check that a tokenizer or processor has a chat template, if a text has conversations.

    Raises:
        typer.BadParameter: It has none.
    """
    from quark.torch.evaluation.datasets import split_shares
    from quark.torch.evaluation.samples import check_template, kind_of_source

    names = [] if source is None else [name for name, _ in split_shares(source)]
    try:
        if any(kind_of_source(name) == "messages" for name in names):
            check_template(reader)
    except (OSError, ValueError) as error:
        raise wrong(flag, str(error)) from None


def text_windows(
    source: str | None, flag: str, tokenizer: Any, length: int, limit: int, held_out: bool
) -> torch.Tensor:
    """Return windows of tokens.

    Args:
        source: File or dataset, or several with their shares of the windows; None for the text of
            this package, or held-out docstrings of the standard library.
        flag: Flag of the source, for the error.
        tokenizer: Tokenizer of the model.
        length: Tokens per window.
        limit: Maximum number of windows (0 = all).
        held_out: Whether to take the part of a named or default text that is reserved for
            evaluation.

    Returns:
        int64 tensor, (windows, length).

    Raises:
        typer.BadParameter: The text does not exist, or is too short.
    """
    import torch

    from quark.torch.evaluation.datasets import split_shares

    try:
        shares = [(source, 1.0)] if source is None else split_shares(source)
        if len(shares) > 1 and not limit:
            raise ValueError(f"{source} mixes sources, so the number of windows cannot be 0 (all)")
        counts = [round(limit * share) for _, share in shares]
        counts[0] += limit - sum(counts)
        if len(shares) > 1 and min(counts) < 1:
            raise ValueError(f"{limit} windows are too few for the shares of {source}")
        parts = [
            _windows_of(name, tokenizer, length, count, held_out)
            for (name, _), count in zip(shares, counts, strict=True)
        ]
    except (ImportError, OSError, ValueError) as error:
        raise wrong(flag, str(error)) from None
    return torch.cat(parts)


def _windows_of(
    source: str | None, tokenizer: Any, length: int, limit: int, held_out: bool
) -> torch.Tensor:
    """Return windows of one text; see ``text_windows``."""
    from quark.demo.text import calibration_documents, evaluation_documents
    from quark.torch.evaluation.chats import renderer_of
    from quark.torch.evaluation.datasets import named_documents
    from quark.torch.evaluation.perplexity import token_windows
    from quark.torch.evaluation.samples import kind_of_source, read_conversations

    if source is not None:
        kind = kind_of_source(source)
        if kind == "messages":
            documents = read_conversations(source, tokenizer)
        elif kind is not None:
            raise ValueError(
                f"{source} holds {kind}, not text: 'quark quantize' calibrates with it as "
                "--dataset."
            )
        else:
            documents = named_documents(source, held_out, renderer_of(tokenizer))
    else:
        enough = CHARACTERS_PER_TOKEN * length * limit
        documents = evaluation_documents() if held_out else calibration_documents(enough)
    try:
        return token_windows(documents, tokenizer, length, limit or None)
    except ValueError as error:
        least = str(error).replace("a length of at most", "shorter windows, such as --seq_len")
        raise ValueError(least) from None


def weight_bytes(path: Path) -> int:
    """Return the bytes on disk of the weights of a model: those of the container that is loaded."""
    from quark.torch.export.recognition import recognize_container

    size = recognize_container(path).size(path)
    return size or sum(file.stat().st_size for file in path.glob("*.bin"))


def read_entries(directory: Path) -> Mapping[str, Entry]:
    """Return the headers of all tensors of a directory of safetensors.

    Raises:
        FileNotFoundError: There are no tensors.
        ValueError: A file is damaged.
    """
    from quark.torch.export.checkpoint.files import CheckpointReader

    return CheckpointReader(directory).entries
