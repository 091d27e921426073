"""Datasets for calibration and evaluation, by their usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quark.torch.evaluation.chats import RenderChat, join_messages
from quark.torch.evaluation.documents import check_source, load_documents
from quark.torch.quantization.config.name_lookup import nearest

_PILE = "mit-han-lab/pile-val-backup"
_WIKITEXT = "Salesforce/wikitext:wikitext-2-raw-v1"
_ULTRACHAT = "HuggingFaceH4/ultrachat_200k"


class NamedSet(NamedTuple):
    """The source of a dataset, and the splits for calibration and evaluation."""

    source: str
    calibration: str  # split
    evaluation: str
    field: str = "text"
    is_one_text: bool = False  # the records are lines of one text


_PILEVAL = NamedSet(_PILE, "validation[:20000]", "validation[-2000:]")
_WIKITEXT2 = NamedSet(_WIKITEXT, "train", "test", is_one_text=True)
NAMED_SETS = {
    "pileval": _PILEVAL,
    "pileval_for_awq_benchmark": _PILEVAL,
    "wikitext": _WIKITEXT2,
    "wikitext_for_gptq_benchmark": _WIKITEXT2,
    "cnn_dailymail": NamedSet(
        "abisee/cnn_dailymail:3.0.0", "train[:20000]", "test[:2000]", "article"
    ),
    _ULTRACHAT: NamedSet(_ULTRACHAT, "train_sft[:20000]", "test_sft[:2000]", "messages"),
    "HelpSteer": NamedSet("nvidia/HelpSteer", "train", "validation", "response"),
}
_SHARE = re.compile(r"(.+):(\d*\.\d+|1(?:\.0*)?)")
_NOT_TEXT = {"ScienceQA": "questions about pictures"}


def split_shares(source: str) -> list[tuple[str, float]]:
    """Return the parts of a mixture such as ``pileval:0.7,my.txt:0.3``, with their shares.

    Args:
        source: A mixture, or one source, whose share is 1. An existing file or directory is one
            source, whatever its name.

    Raises:
        ValueError: A part of a mixture has no share, or the shares do not add up to 1.
    """
    parts = source.split(",")
    matches = [_SHARE.fullmatch(part.strip()) for part in parts]
    if Path(source).exists() or not any(matches):
        return [(source, 1.0)]
    shares = [(m[1], float(m[2])) for m in matches if m is not None]
    total = sum(share for _, share in shares)
    if len(shares) < len(parts) or abs(total - 1) > 1e-6 or min(s for _, s in shares) <= 0:
        raise ValueError(
            f"{source} mixes sources: expected NAME:SHARE for each, with commas, and shares that "
            "add up to 1, such as pileval:0.7,my.txt:0.3"
        )
    return shares


def check_named(name: str) -> None:
    """Check what can be known of a name for `named_documents` without reading anything.

    Raises:
        FileNotFoundError: There is no such file, and no dataset can have this name; or the Hub
            cannot be reached, and the dataset is not in the local cache.
        ImportError: The ``datasets`` library is needed and missing.
        ValueError: The type of the file is unknown, or the dataset has no text.
    """
    _check_text(name)
    if Path(name).exists() or name not in NAMED_SETS:
        with _named(name):
            check_source(name)
        return
    with _named(name):
        check_source(NAMED_SETS[name].source)


def _check_text(name: str) -> None:
    if name in _NOT_TEXT:
        raise ValueError(
            f"{name} holds {_NOT_TEXT[name]}, and models are given text alone: choose one "
            f"of {', '.join(NAMED_SETS)}, or a local file"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let the message for a missing dataset have its usual name, or the one that was meant."""
    try:
        yield
    except FileNotFoundError as error:
        if name in NAMED_SETS:
            raise FileNotFoundError(f"{name}: {error}") from error
        near = nearest(name, NAMED_SETS, count=1)
        raise FileNotFoundError(f"{error}. Nearest name: {near[0]}" if near else error) from error


def named_documents(name: str, held_out: bool, render: RenderChat = join_messages) -> list[str]:
    """Return the documents of a file, a directory or a dataset.

    Args:
        name: One of ``NAMED_SETS``, or a source for `load_documents`. A local file or directory
            comes before a dataset of the same name.
        held_out: Whether to return the evaluation split of a named dataset; else the calibration
            split.
        render: Returns the text of a chat, which is a list of messages.

    Raises:
        FileNotFoundError: No file, directory or reachable dataset has this name.
        ImportError: The ``datasets`` library is needed and missing.
        ValueError: The dataset holds no text.
    """
    _check_text(name)
    if name not in NAMED_SETS or Path(name).exists():
        return load_documents(name, render=render)
    chosen = NAMED_SETS[name]
    split = chosen.evaluation if held_out else chosen.calibration
    with _named(name):
        documents = load_documents(chosen.source, split, chosen.field, render)
    return ["\n\n".join(documents)] if chosen.is_one_text else documents
