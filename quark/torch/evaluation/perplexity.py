"""Perplexity of a causal language model: documents → token windows → one figure.

The steps are separate so that two models, or two toolkits, can be given the very same windows:

    windows = token_windows(load_documents("text.txt"), tokenizer, length=2048)
    perplexity(model, windows)
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

ROWS_AT_ONCE = 512  # token positions converted to float32 together
DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # [owner/]name[:configuration]
FILE_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it all."""

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a document, None where there is no such token."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a document, None where there is no such token."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Sequence[int]:
        """Return the token identifiers of ``text``."""


# ------------------------------------------------------------------------------------- windows


def token_windows(
    documents: Sequence[str], tokenizer: Tokenizer, length: int, limit: int | None = None
) -> torch.Tensor:
    """Tokenize documents, lay them end to end and cut the row into whole windows.

    A document becomes beginning-of-text, its tokens, end-of-text, each of the two markers where
    the tokenizer has it. Documents without tokens are passed over, and so is the incomplete
    window at the end. No more documents are read than ``limit`` windows need.

    Args:
        documents: Texts, in the order in which they are laid.
        tokenizer: Tokenizer of the model.
        length: Tokens in a window.
        limit: Most windows to return, None for all of them.

    Returns:
        Token identifiers, (windows, length) int64, on the CPU.

    Raises:
        ValueError: The documents hold less than one window, or an argument is out of range.
    """
    if isinstance(documents, str):
        raise ValueError("documents is one string; give a list of them: [text]")
    if length < 1 or (limit is not None and limit < 1):
        raise ValueError(f"length and limit must be at least 1, got {length} and {limit}")
    pieces: list[torch.Tensor] = []
    count = 0
    for document in documents:
        if limit is not None and count >= limit * length:
            break
        pieces.append(_document_tokens(document, tokenizer))
        count += len(pieces[-1])
    if count < length:
        raise ValueError(
            f"{len(documents)} document(s) hold {count} tokens, less than one window of {length}; "
            f"give more text or a length of at most {count}"
        )
    windows = count // length if limit is None else min(limit, count // length)
    return torch.cat(pieces)[: windows * length].reshape(windows, length)


def _document_tokens(text: str, tokenizer: Tokenizer) -> torch.Tensor:
    """Tokens of one document between its markers, (tokens,) int64; none for an empty text."""
    # verbose=False: the text is cut afterwards, a warning about its length would mislead
    tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(tokens) == 0:
        return torch.empty(0, dtype=torch.int64)
    marked = [tokenizer.bos_token_id, *tokens, tokenizer.eos_token_id]
    return torch.tensor([token for token in marked if token is not None], dtype=torch.int64)


# ---------------------------------------------------------------------------------- perplexity


def perplexity(
    model: nn.Module,
    windows: torch.Tensor,
    batch_size: int = 8,
    progress: str | None = None,
    context: int = 1,
) -> float:
    """Exponential of the mean negative log-likelihood of every token given those before it.

    Each window is scored by itself; its first token has nothing before it and is not scored.
    Logarithms are taken in float32 and added in float64, whatever the model computes in. Of the
    logits only those of one batch exist at a time. The model is put in evaluation mode, and each
    of its modules is back in its own mode afterwards.

    Args:
        model: Model that takes token identifiers (batch, length) and returns logits
            (batch, length, vocabulary): a tensor, the first of a tuple, or an attribute or item
            named ``logits``.
        windows: Token identifiers, (windows, length), as `token_windows` makes them.
        batch_size: Windows in one forward pass.
        progress: Title of a progress bar, which appears on a terminal if the work lasts more
            than a second; None for no bar.
        context: Tokens at the beginning of each window that are read but not scored.

    Returns:
        The perplexity: at least 1, the vocabulary's size for a model that knows nothing, infinite
        where float64 cannot hold it.

    Raises:
        ValueError: The windows are empty, too short or not integers, or ``batch_size`` or
            ``context`` is below 1.
        FloatingPointError: The likelihood of a window is not a finite number.
    """
    _check_windows(windows, batch_size, context)
    options = {"use_cache": False} if _takes_use_cache(model) else {}
    device = _input_device(model, default=windows.device)
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode(), _evaluating(model):
        for start in _steps(len(windows), batch_size, progress):
            tokens = windows[start : start + batch_size].to(device, torch.int64)
            losses = _window_losses(_logits(model(tokens, **options)), tokens, context)
            if not losses.isfinite().all():
                bad = int((~losses.isfinite()).nonzero()[0])
                raise FloatingPointError(
                    f"window {start + bad} of {len(windows)} has a negative log-likelihood of "
                    f"{float(losses[bad])}; look for nan, inf or overflow in the model's logits"
                )
            total += losses.sum()
    scored = len(windows) * (windows.shape[1] - context)
    return float(torch.exp(total / scored))


def _check_windows(windows: torch.Tensor, batch_size: int, context: int) -> None:
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] <= context:
        raise ValueError(
            f"windows has shape {tuple(windows.shape)}; expected (windows, length) with at least "
            f"one window and {context + 1} tokens in it"
        )
    if windows.is_floating_point() or windows.is_complex() or windows.dtype == torch.bool:
        raise ValueError(f"windows holds {windows.dtype}; expected integer token identifiers")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _takes_use_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


def _input_device(model: nn.Module, default: torch.device) -> torch.device:
    """Device of the first stored tensor; ``default`` where there is none (or it is offloaded)."""
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), default)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has the mode it had, which may differ among them."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _steps(count: int, step: int, progress: str | None) -> Iterator[int]:
    """First index of each batch, with a bar if there is a title for it."""
    starts = range(0, count, step)
    if progress is None:
        return iter(starts)
    bar = import_module("tqdm").tqdm(starts, desc=progress, delay=1.0, disable=None, leave=False)
    return iter(bar)


def _logits(output: Any) -> torch.Tensor:
    """Logits among what a model returned, (batch, length, vocabulary)."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple):
        output = output[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        shape = getattr(logits, "shape", None)
        raise ValueError(
            f"the model returned {type(logits).__name__} of shape {shape}; expected logits "
            "(batch, length, vocabulary), those of a causal language model"
        )
    return logits


def _window_losses(logits: torch.Tensor, tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Sum of the next-token negative log-likelihoods of each window, (batch,) float64, on the CPU.

    Converts a few hundred positions at a time: a float32 copy of all logits of a batch would take
    twice the memory of the logits themselves.
    """
    targets = tokens[:, context:].to(logits.device)
    losses = [
        torch.cat(
            [
                functional.cross_entropy(part.float(), target, reduction="none")
                for part, target in zip(
                    rows.split(ROWS_AT_ONCE), wanted.split(ROWS_AT_ONCE), strict=True
                )
            ]
        )
        for rows, wanted in zip(logits[:, context - 1 : -1], targets, strict=True)
    ]
    return torch.stack(losses).cpu().double().sum(-1)  # float64 is not on every device


# ----------------------------------------------------------------------------------- documents


def load_documents(
    source: str | Path, split: str | None = None, text_field: str = "text"
) -> list[str]:
    """Read documents from a file, or from a dataset through the ``datasets`` library.

    ========================================  ==================================================
    ``source``                                documents
    ========================================  ==================================================
    ``.txt`` file (UTF-8)                     what lies between NUL characters, blank ones left
                                              out; the whole file if there is no NUL
    ``.jsonl``, ``.json``, ``.csv``,          ``text_field`` of each record, as it is
    ``.parquet`` file
    directory of a dataset                    ``text_field`` of each record of ``split``
    name of a dataset, or                     the same, downloaded or from the local cache, as
    ``name:configuration``                    in ``Salesforce/wikitext:wikitext-2-raw-v1``
    ========================================  ==================================================

    Args:
        source: File, directory or name.
        split: Part of the dataset, such as ``test`` or ``train[:1000]``. May be left out where
            there is only one; a file has none.
        text_field: Field that holds the text.

    Returns:
        The documents in their order. A record without text gives an empty one, and a chat, a list
        of messages, what its messages say, one after another.

    Raises:
        FileNotFoundError: Nothing of that name is here or can be reached.
        ImportError: The ``datasets`` library is needed and missing.
        ValueError: The file's type, the split or the field does not exist, or there is no text.
    """
    path = Path(source)
    if path.is_file():
        documents = _read_file(path, split, text_field)
    elif path.is_dir() or _is_dataset_name(source):
        records = _dataset_records(str(source), split)
        documents = [_record_text(record, text_field, source) for record in records]
    else:
        raise FileNotFoundError(f"there is no file or directory {source}")
    if not any(document.strip() for document in documents):
        raise ValueError(f"there is no text in {source}")
    return documents


def _is_dataset_name(source: str | Path) -> bool:
    """Whether to ask for this name elsewhere, which takes long where there is no network."""
    if isinstance(source, Path) or Path(source).suffix in (".txt", *FILE_READERS):
        return False
    return DATASET_NAME.fullmatch(source) is not None


def _read_file(path: Path, split: str | None, text_field: str) -> list[str]:
    if split is not None:
        raise ValueError(f"{path} is one file and has no split {split!r}; leave split out")
    kind = path.suffix.lower()
    if kind == ".txt":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first") from error
        return [document for document in text.split("\0") if document.strip()]
    if kind not in FILE_READERS:
        known = ", ".join([".txt", *FILE_READERS])
        raise ValueError(f"{path} is of unknown type {kind!r}; expected one of {known}")
    datasets = _import_datasets(path)
    try:  # streaming reads in place; otherwise a copy of the file is put in the user's cache
        records = list(
            datasets.load_dataset(
                FILE_READERS[kind], data_files=str(path), split="train", streaming=True
            )
        )
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from error
    return [_record_text(record, text_field, path) for record in records]


def _dataset_records(source: str, split: str | None) -> Iterable[Mapping[str, Any]]:
    """Records of one split of a dataset's directory, saved directory, or name."""
    datasets = _import_datasets(source)
    path = Path(source)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(source)
        splits = saved if isinstance(saved, Mapping) else {"train": saved}
        return cast(Iterable[Mapping[str, Any]], splits[_one_split(splits, split, source)])
    name, _, configuration = (source, "", "") if path.is_dir() else source.partition(":")
    try:
        if split is None:
            splits = datasets.get_dataset_split_names(name, configuration or None)
            split = _one_split(splits, split, source)
        records = datasets.load_dataset(name, configuration or None, split=split)
    except OSError as error:  # includes the library's own "not found" and "offline"
        raise FileNotFoundError(
            f"{source!r} is no file or directory here, and no dataset of that name can be "
            f"reached: {error}. Check the name and the connection, or give a local file"
        ) from error
    return cast(Iterable[Mapping[str, Any]], records)


def _one_split(splits: Iterable[str], split: str | None, source: str) -> str:
    """The split asked for, or the only one there is."""
    names = list(splits)
    if split is None and len(names) == 1:
        return names[0]
    if split not in names:
        asked = "name one of them" if split is None else f"there is no {split!r}"
        raise ValueError(f"{source} has the splits {', '.join(names)}; {asked}")
    return split


def _record_text(record: Mapping[str, Any], text_field: str, source: str | Path) -> str:
    if text_field not in record:
        fields = ", ".join(record)
        raise ValueError(f"{source} has no field {text_field!r}; its fields are {fields}")
    text = record[text_field]
    if isinstance(text, list) and all(isinstance(part, Mapping) for part in text):  # a chat
        text = "\n\n".join(str(part.get("content") or "") for part in text)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{text_field!r} of {source} holds {type(text).__name__}, expected text")
    return text or ""


def _import_datasets(source: str | Path) -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"reading {source} needs the datasets library: pip install datasets (or install this "
            'package with its "data" extra); a .txt file needs nothing'
        ) from error
