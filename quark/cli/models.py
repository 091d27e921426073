"""Models, tokenizers and text as the verbs need them; torch and transformers load on use."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import stage, wrong

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.report.summary import Entry, Summary

EMBEDDED = "docstrings of the standard library"
CHARACTERS_PER_TOKEN = 8  # of English text in any vocabulary, at most
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NOT_LOADED = ["original/*", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]  # other forms of the weights
UNBOUNDED = 1 << 20  # tokenizers say a huge number where there is no bound


def find_model(given: Path, flag: str, revision: str | None = None) -> Path:
    """Return the directory of a model, which comes from the Hub where there is none.

    Raises:
        typer.BadParameter: There is neither a directory nor a model of the Hub of that name.
    """
    if given.is_dir() or not HUB_NAME.fullmatch(given.as_posix()):
        return given
    from huggingface_hub import snapshot_download

    try:
        with stage(f"finding {given}"):
            found = snapshot_download(
                given.as_posix(), revision=revision, ignore_patterns=NOT_LOADED
            )
    except (OSError, ValueError) as error:  # includes those of the Hub and of the network
        first = str(error).strip().split("\n")[0]
        raise wrong(
            flag,
            f"there is no directory {given}, and no model of that name can be reached on the "
            f"Hugging Face Hub ({first}). Give the directory of a model.",
        ) from None
    return Path(found)


def read_config(directory: Path, flag: str) -> dict[str, Any]:
    """Return what a model's directory says of it; see ``read_description``.

    Raises:
        typer.BadParameter: It is not the directory of a model.
    """
    from quark.torch.export.checkpoint.config_json import read_description

    if not directory.is_dir():
        raise wrong(
            flag,
            f"there is no directory {directory}. Give that of a model; one of the Hub comes by "
            "'hf download OWNER/NAME --local-dir DIRECTORY'.",
        )
    try:
        return read_description(directory)
    except (FileNotFoundError, ValueError) as error:
        raise wrong(flag, f"{error} A model's directory has its config.json.") from None


def pick_device(name: str) -> str:
    """Return ``cuda`` or ``cpu``.

    Raises:
        typer.BadParameter: A GPU is wanted and there is none.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise wrong("--device", "this machine has no GPU that torch can use. Give cpu or auto.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def load_model(
    directory: Path,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> nn.Module:
    """Return the causal language model of a directory, quantized or not, in evaluation mode.

    Args:
        directory: Directory of the model.
        dtype: Type to load it in, or auto for that it has.
        device: Device to put it on.
        trust_remote_code: Whether code that comes with it may run.
        attention: How attention is computed, None for what Transformers takes.
    """
    from transformers import AutoModelForCausalLM

    from quark.torch.export.checkpoint import architecture as build
    from quark.torch.export.checkpoint.config_json import is_for_transformers
    from quark.torch.export.recognition import open_checkpoint

    _quiet_transformers()
    model: nn.Module
    if not is_for_transformers(directory):
        loading = open_checkpoint(directory, trust_remote_code, attn_implementation=attention)
        model = loading.fill()
    else:
        if any(directory.glob("*.safetensors")):
            config = build.read_config(directory, trust_remote_code)
            build.check_counts(config, read_entries(directory), directory)
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attention,
        )
    return model.to(device).eval()


def load_tokenizer(directory: Path, flag: str, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a directory.

    Raises:
        typer.BadParameter: There is none.
    """
    from transformers import AutoTokenizer

    _quiet_transformers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise wrong(flag, f"{directory} has no tokenizer that can be loaded ({first}).") from None
    files = ["tokenizer_config.json", *tokenizer.vocab_files_names.values()]
    if not any((directory / file).is_file() for file in files):
        # what comes then is the empty tokenizer of this type of model
        raise wrong(flag, f"{directory} has no tokenizer. Copy its files beside the model.")
    return tokenizer


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # It was imported before perhaps, and has read its own setting then.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def window_length(
    config: dict[str, Any], wanted: int | None, default: int, flag: str = "--seq_len"
) -> int:
    """Return the tokens of a window: what is wanted, or what the model can take of the default.

    Raises:
        typer.BadParameter: The model takes less than what is wanted.
    """
    inner = config.get("text_config")
    config = {**(inner if isinstance(inner, dict) else {}), **config}
    most = config.get("max_position_embeddings") or UNBOUNDED
    if wanted is not None and wanted > most:
        raise wrong(flag, f"{wanted} is more than the {most} tokens the model can take.")
    return wanted or min(default, most)


def text_windows(
    source: str | None, flag: str, tokenizer: Any, length: int, limit: int, held_out: bool
) -> torch.Tensor:
    """Return windows of tokens, (windows, length).

    Args:
        source: File or dataset, None for the text that comes with Python.
        flag: Flag that the source was given by.
        tokenizer: Tokenizer of the model.
        length: Tokens of a window.
        limit: Most windows; 0 for all, which a source or held-out text must have an end for.
        held_out: Whether text of a name, or without one, is that which no model is calibrated on.

    Raises:
        typer.BadParameter: There is no such text, or too little of it.
    """
    from quark.demo.text import calibration_documents, evaluation_documents
    from quark.torch.evaluation.datasets import named_documents
    from quark.torch.evaluation.perplexity import token_windows

    try:
        if source is not None:
            documents = named_documents(source, held_out)
        else:
            enough = CHARACTERS_PER_TOKEN * length * limit
            documents = evaluation_documents() if held_out else calibration_documents(enough)
        return token_windows(documents, tokenizer, length, limit or None)
    except (ImportError, OSError, ValueError) as error:
        raise wrong(flag, str(error)) from None


def weight_bytes(directory: Path) -> int:
    """Return the bytes that the weights of a model take on disk.

    Of several forms of the same weights only the one that is loaded counts.
    """
    for pattern in ("*.safetensors", "*.pth", "*.bin", "*.gguf"):
        sizes = [file.stat().st_size for file in directory.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0


def read_entries(directory: Path) -> dict[str, Entry]:
    """Return the headers of all tensors of a checkpoint.

    Raises:
        FileNotFoundError: There are no tensors.
        ValueError: A file is damaged.
    """
    from quark.torch.export.checkpoint.files import NATIVE, CheckpointReader, NativeReader

    native = (directory / NATIVE).is_file() and not any(directory.glob("*.safetensors"))
    return dict((NativeReader if native else CheckpointReader)(directory).entries)


def read_summary(directory: Path) -> tuple[Summary, str]:
    """Return what a checkpoint holds, and why its layers are not told apart if they are not.

    That is so where the configuration is of another method, or says what this version does not
    know; tensors are then summarized by type alone, as in a float model.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
    """
    from quark.torch.export.checkpoint.config_json import CONFIG, read_description
    from quark.torch.export.checkpoint.reader import format_of
    from quark.torch.report.summary import summarize

    described = read_description(directory)
    config, note = None, ""
    if "quantization_config" in described:
        try:
            found = format_of(described, str(directory / CONFIG))
            config = found.config if found.name == "quark" else None
            note = "" if config else f"layers are not told apart in the format {found.name!r}"
        except (TypeError, ValueError) as error:
            note = f"layers are not told apart: {error}"
    dtype = described.get("dtype") or described.get("torch_dtype")
    return summarize(read_entries(directory), config, dtype), note
