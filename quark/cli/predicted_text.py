"""The structure of a model before its weights are read, and whether it predicts text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import wrong

if TYPE_CHECKING:
    from torch import nn


def read_outline(directory: Path, trust_remote_code: bool = False) -> nn.Module | None:
    """Return the model of a directory or GGUF file on the meta device; None without either.

    Raises:
        ValueError: The files are damaged, or Transformers cannot build the model.
    """
    from quark.torch.export.checkpoint.architecture import empty_model, read_config
    from quark.torch.export.checkpoint.files import CheckpointReader
    from quark.torch.export.gguf.matching import match_gguf

    if directory.is_file():
        return match_gguf(directory).model
    if not any(directory.glob("*.safetensors")):
        return None
    config = read_config(directory, trust_remote_code)
    entries = CheckpointReader(directory).entries
    return empty_model(config, entries, directory, trust_remote_code=trust_remote_code)


def predicts_text(outline: Any) -> bool:
    """Whether perplexity of text is defined for a model; True where its structure is not known.

    Classifiers, models of images or audio, models for masked tokens, and encoder-decoders predict
    no next token.
    """
    from quark.torch.evaluation.next_token import why_no_next_token

    if outline is None or not hasattr(outline, "get_output_embeddings"):
        return True
    has_head = outline.get_output_embeddings() is not None
    return has_head and not why_no_next_token(outline) and reads_text(outline)


def reads_text(outline: nn.Module | None) -> bool:
    """Whether tokens of text alone run a model; True where its structure is not known."""
    return getattr(outline, "main_input_name", "input_ids") == "input_ids" and not _has_heads(
        outline
    )


def name_of_input(outline: Any) -> str:
    """Name the input of a model that does not read text."""
    return "several tokens at a position" if _has_heads(outline) else str(outline.main_input_name)


def _has_heads(outline: Any) -> bool:
    """Whether a model predicts several tokens at a position, such as the codebooks of MusicGen."""
    from torch import nn

    find = getattr(outline, "get_output_embeddings", lambda: None)
    heads = find()
    return isinstance(heads, nn.ModuleList) and len(heads) > 1


def check_predicts_text(
    directory: Path, flag: str, remedy: str, trust_remote_code: bool = False
) -> None:
    """Check that the model of a directory predicts the next token.

    Args:
        directory: Directory of the model, or its GGUF file.
        flag: Flag for the error.
        remedy: Sentence for the error: what to type.
        trust_remote_code: Whether Python code from the directory may run.

    Raises:
        typer.BadParameter: It does not.
    """
    outline = read_outline(directory, trust_remote_code)
    if not predicts_text(outline):
        raise wrong(
            flag,
            f"{type(outline).__name__} does not predict the next token, so it has no perplexity. "
            f"{remedy}",
        )


def check_reads_text(directory: Path, flag: str, trust_remote_code: bool = False) -> None:
    """Check that text runs the model of a directory.

    Args:
        directory: Directory of the model, or its GGUF file.
        flag: Flag for the error.
        trust_remote_code: Whether Python code from the directory may run.

    Raises:
        typer.BadParameter: It reads something else.
    """
    outline: Any = read_outline(directory, trust_remote_code)
    if not reads_text(outline):
        raise wrong(
            flag,
            f"{type(outline).__name__} reads {name_of_input(outline)}, not text, and this verb "
            "takes text alone. 'quark quantize' takes other data with --dataset.",
        )
