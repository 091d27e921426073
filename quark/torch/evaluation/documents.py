"""Documents: texts from local files, or from datasets through the ``datasets`` library."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from quark.torch.evaluation import hub_access
from quark.torch.evaluation.chats import RenderChat, join_messages
from quark.torch.quantization.config.name_lookup import nearest

DATASET_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")  # [owner/]name[:configuration]
TEXT_FILES = (".txt", ".md")  # in UTF-8
FILE_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_GIVE_TEXT = "Give a text file such as my.txt, a directory, or a data set such as pileval"


def load_documents(
    source: str | Path,
    split: str | None = None,
    text_field: str = "text",
    render: RenderChat = join_messages,
) -> list[str]:
    """Read documents from a file, or from a dataset through the ``datasets`` library.

    ========================================  ==================================================
    ``source``                                documents
    ========================================  ==================================================
    ``.txt`` or ``.md`` file (UTF-8)          the texts between NUL characters, without blank
                                              ones; the whole file if it has no NUL
    ``.jsonl``, ``.json``, ``.csv``,          ``text_field`` of each record
    ``.parquet`` file
    directory of a dataset                    ``text_field`` of each record of ``split``
    name of a dataset, or                     the same, downloaded or from the local cache; for
    ``name:configuration``                    example ``Salesforce/wikitext:wikitext-2-raw-v1``
    ========================================  ==================================================

    Args:
        source: File, directory or name.
        split: Split of the dataset, such as ``test`` or ``train[:1000]``. Optional for datasets
            with one split; not allowed for files.
        text_field: Field that holds the text.
        render: Returns the text of a chat, which is a list of messages.

    Returns:
        The documents in order. A record without text is an empty document.

    Raises:
        FileNotFoundError: No file, directory or reachable dataset has this name.
        ImportError: The ``datasets`` library is needed and missing.
        ValueError: The type of the file, the split or the field is unknown, or there is no text.
    """
    path = Path(source)
    if path.is_file():
        documents = _read_file(path, split, text_field, render)
    elif path.is_dir() or _is_dataset_name(source):
        records = _dataset_records(str(source), split)
        documents = [_record_text(record, text_field, source, render) for record in records]
    else:
        raise FileNotFoundError(_missing(source))
    if not any(document.strip() for document in documents):
        raise ValueError(f"there is no text in {source}. {_GIVE_TEXT}")
    return documents


def check_source(source: str | Path) -> None:
    """Check what can be known of a source for `load_documents` without reading it.

    Raises:
        FileNotFoundError: There is no such file, and no dataset can have this name; or the Hub
            cannot be reached, and the dataset is not in the local cache.
        ImportError: The ``datasets`` library is needed and missing.
        ValueError: The type of the file is unknown.
    """
    path = Path(source)
    if path.is_file():
        _check_kind(path)
    elif not (path.is_dir() or _is_dataset_name(source)):
        raise FileNotFoundError(_missing(source))
    if path.is_file() and path.suffix.lower() in TEXT_FILES:
        return
    datasets = _import_datasets(source)
    if path.exists():
        return
    name, _, configuration = str(source).partition(":")
    with _library_errors(str(source), datasets) as can_ask:
        if not can_ask:
            datasets.load_dataset_builder(name, configuration or None)  # from the cache


def _missing(source: str | Path) -> str:
    """Return the message for a source that does not exist, with what was likely meant."""
    path, parts = Path(source), str(source).split(",")
    if len(parts) > 1:
        share = round(1 / len(parts), 2)
        shares = [share] * (len(parts) - 1) + [round(1 - share * (len(parts) - 1), 2)]
        mixture = ",".join(f"{p.strip()}:{s:g}" for p, s in zip(parts, shares, strict=True))
        return f"there is no file {source}. Give each source its share, such as {mixture}"
    known = (*TEXT_FILES, *FILE_READERS)
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    near = nearest(path.name, [p.name for p in beside if p.suffix.lower() in known], count=1)
    hint = f"Did you mean {(path.parent / near[0]).as_posix()!r}? " if near else ""
    return f"there is no file or directory {source}. {hint}{_GIVE_TEXT}"


def _check_kind(path: Path) -> None:
    kind = path.suffix.lower()
    if kind not in (*TEXT_FILES, *FILE_READERS):
        known = ", ".join([*TEXT_FILES, *FILE_READERS])
        raise ValueError(
            f"{path} is of unknown type {kind!r}; expected one of {known}. Save its text as .txt"
        )


def _is_dataset_name(source: str | Path) -> bool:
    """Whether a name may be that of a dataset; looking it up is slow without a network."""
    if isinstance(source, Path) or Path(source).suffix in (*TEXT_FILES, *FILE_READERS):
        return False
    return DATASET_NAME.fullmatch(source) is not None


def _read_file(path: Path, split: str | None, text_field: str, render: RenderChat) -> list[str]:
    if split is not None:
        raise ValueError(f"{path} is one file and has no split {split!r}; leave split out")
    kind = path.suffix.lower()
    if kind in TEXT_FILES:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error}); convert it first") from error
        return [document for document in text.split("\0") if document.strip()]
    _check_kind(path)
    datasets = _import_datasets(path)
    try:  # streaming reads the file in place; otherwise the library copies it to its cache
        records = list(
            datasets.load_dataset(
                FILE_READERS[kind], data_files=str(path), split="train", streaming=True
            )
        )
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from error
    return [_record_text(record, text_field, path, render) for record in records]


def _dataset_records(source: str, split: str | None) -> Iterable[Mapping[str, Any]]:
    """Return the records of one split of a dataset: a directory, a saved dataset, or a name."""
    datasets = _import_datasets(source)
    path = Path(source)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(source)
        splits = saved if isinstance(saved, Mapping) else {"train": saved}
        return cast(Iterable[Mapping[str, Any]], splits[_choose_split(splits, split, source)])
    name, _, configuration = (source, "", "") if path.is_dir() else source.partition(":")
    with _library_errors(source, datasets):
        if split is None:
            splits = datasets.get_dataset_split_names(name, configuration or None)
            split = _choose_split(splits, split, source)
        records = datasets.load_dataset(name, configuration or None, split=split)
    return cast(Iterable[Mapping[str, Any]], records)


@contextmanager
def _library_errors(source: str, datasets: Any) -> Iterator[bool]:
    """Raise errors of the library in other words, and at once where there is no network.

    Yields:
        Whether the library may ask the Hub; otherwise it looks into its cache alone.

    Raises:
        FileNotFoundError: There is no such dataset, or the Hub cannot be reached.
        ValueError: The dataset is damaged.
    """
    obstacle = None if Path(source).is_dir() else hub_access.find_obstacle()
    try:
        with nullcontext() if obstacle is None else hub_access.cache_only(datasets):
            yield obstacle is None
    except OSError as error:  # includes the library's own "not found"
        said = f"no dataset of that name can be reached: {error}. Check the name and the connection"
        if obstacle is not None:
            said = obstacle
        raise FileNotFoundError(
            f"{source!r} is no file or directory here, and {said}, or give a text file such as "
            "my.txt"
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        reason = error.__cause__ or error
        raise ValueError(f"{source} is no data set: {reason}. {_GIVE_TEXT}") from error


def _choose_split(splits: Iterable[str], split: str | None, source: str) -> str:
    """Return the requested split, or the only one."""
    names = list(splits)
    if split is None and len(names) == 1:
        return names[0]
    if split not in names:
        advice = "name one of them" if split is None else f"there is no {split!r}"
        raise ValueError(f"{source} has the splits {', '.join(names)}; {advice}")
    return split


def _record_text(
    record: Mapping[str, Any], text_field: str, source: str | Path, render: RenderChat
) -> str:
    if text_field not in record:
        fields = ", ".join(record)
        raise ValueError(
            f"{source} has no field {text_field!r}; its fields are {fields}. Give the text of each "
            f"record in {text_field!r}"
        )
    text = record[text_field]
    if isinstance(text, list) and all(isinstance(part, Mapping) for part in text):  # a chat
        text = render(text)
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
