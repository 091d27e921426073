"""Calibration data as users give it: made repeatable, and checked before any work."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from quark.torch.numerics.finite import is_finite
from quark.torch.pipeline.batches import flatten_batches, not_a_batch
from quark.torch.pipeline.statistics import digest, sequence_digests

_FIRST = "its first tensor"
_EXPECTED = (
    "give a list, a DataLoader or another iterable of batches, each a tensor, a mapping of "
    "arguments or a list of these"
)


def make_repeatable(source: Iterable[Any] | None) -> Iterable[Any]:
    """Return the batches of a data source, which can be iterated over repeatedly.

    ==============================================  ================================================
    source                                          batches
    ==============================================  ================================================
    list, ``DataLoader`` in a fixed order           its items, read again in each pass
    iterator, iterable without a length,            its items, read once and kept in memory
    ``DataLoader`` that shuffles or is that of an
    ``IterableDataset``
    tensor of two axes or more                      its rows
    mapping, such as the output of a tokenizer      one
    None                                            none
    ==============================================  ================================================

    Raises:
        TypeError: The source is none of these.
        ValueError: It is a tensor of fewer axes.
    """
    if source is None:
        return ()
    if isinstance(source, torch.Tensor):
        if source.dim() < 2:
            raise ValueError(
                f"The dataloader is one tensor of shape {tuple(source.shape)}: give rows, such as "
                "(sequences, tokens)."
            )
        return torch.split(source, 1) if len(source) else ()
    if hasattr(source, "items"):
        return [source]
    if isinstance(source, (str, bytes)) or not _is_iterable(source):
        raise TypeError(f"The dataloader is a {type(source).__name__}: {_EXPECTED}.")
    return source if _is_repeatable(source) else list(source)


def hold_in_memory(source: Iterable[Any] | None) -> Iterable[Any] | None:
    """Return a data source as a list, which several threads can read; None for none.

    A source that may give its items in another order is read once, so all threads have the same.

    Raises:
        TypeError: As in ``make_repeatable``.
        ValueError: Likewise.
    """
    return None if source is None else list(make_repeatable(source))


def _is_iterable(source: Any) -> bool:
    return hasattr(source, "__iter__") or hasattr(source, "__getitem__")


def _is_repeatable(source: Any) -> bool:
    """Whether a source can be expected to give the same items again, in the same order."""
    if not isinstance(source, Sized) or isinstance(source, Iterator):
        return False
    if isinstance(source, DataLoader) and not _is_in_order(source):
        return False
    if isinstance(getattr(source, "dataset", None), IterableDataset):
        return False
    try:
        len(source)
    except TypeError:
        return False
    return True


def _is_in_order(loader: DataLoader[Any]) -> bool:
    """Whether a loader is known to read its data set from the first item to the last."""
    batches = loader.batch_sampler
    if batches is None:
        return type(loader.sampler) is SequentialSampler
    return type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler


def check_batches(model: nn.Module, batches: Iterable[Any]) -> str | None:
    """Check that a model can be expected to run on all batches, and return their digest.

    Args:
        model: The model, which does not run.
        batches: Repeatable batches.

    Returns:
        The result of ``data_digest``; None if there is no batch with a row.

    Raises:
        TypeError: An item is not a batch, or has no argument of the model.
        ValueError: A batch has NaN or infinite values or no tensors, or ids of tokens that the
            model does not take. The message has the index of the batch.
    """
    words, digests = vocabulary_size(model), list[str]()
    for index, item in enumerate(batches):
        for batch in flatten_batches([item]):
            named = dict(_tensors(batch, index))
            _check_names(model, batch, index)
            ids = named.get("input_ids", named.get(_FIRST))
            _check_ids(model, named, index)
            for name, x in named.items():
                if not name.endswith("mask") and not is_finite(x):
                    raise ValueError(
                        f"Batch {index} of the dataloader has NaN or infinite values in {name}: "
                        "check the data."
                    )
            _check_tokens(ids, words, index)
            digests += sequence_digests([batch])
    return digest(*digests) if digests else None


def _tensors(batch: Any, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the tensors of a batch by name."""
    if isinstance(batch, torch.Tensor):
        yield _FIRST, batch
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            if isinstance(value, torch.Tensor):
                yield f"tensor {number}" if number else _FIRST, value
    elif hasattr(batch, "items"):
        tensors = [(str(k), v) for k, v in batch.items() if isinstance(v, torch.Tensor)]
        if not tensors:
            kinds = ", ".join(f"{key} is a {type(value).__name__}" for key, value in batch.items())
            raise ValueError(
                f"Batch {index} of the dataloader has no tensors ({kinds or 'it is empty'}): pass "
                'return_tensors="pt" to the tokenizer, or convert the values to tensors.'
            )
        yield from tensors
    else:
        raise not_a_batch(batch)


def _check_names(model: nn.Module, batch: Any, index: int) -> None:
    """Raise if no key of a mapping names an argument of the model."""
    if not hasattr(batch, "items"):
        return
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if names and not {*names} & {str(key) for key in batch}:
        raise TypeError(
            f"Batch {index} of the dataloader has {', '.join(map(str, batch))}, but "
            f"{type(model).__name__} takes {', '.join(names[:4])}{', …' if names[4:] else ''}. "
            "Rename the keys."
        )


def _check_ids(model: nn.Module, tensors: dict[str, torch.Tensor], index: int) -> None:
    """Raise if tensors have no values, or ids of tokens are no integers in rows."""
    for name, x in tensors.items():
        if x.is_meta:
            raise ValueError(
                f"Batch {index} of the dataloader has no values: {name} is on the meta device. "
                "Make the batches on a real one."
            )
    takes_ids = getattr(model, "main_input_name", None) == "input_ids"
    ids = tensors.get("input_ids", tensors.get(_FIRST) if takes_ids else None)
    if ids is None or not takes_ids:
        return
    place = f"Batch {index} of the dataloader has ids of tokens"
    if ids.is_floating_point():
        raise ValueError(f"{place} in {ids.dtype}: convert them with .long().")
    if ids.dim() < 2:
        raise ValueError(
            f"{place} of shape {tuple(ids.shape)}: give rows, (sequences, tokens), such as "
            "ids.unsqueeze(0)."
        )


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the number of tokens that a model embeds, None if it is not known."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def _check_tokens(ids: torch.Tensor | None, words: int | None, index: int) -> None:
    """Raise if a token has no row in the embedding."""
    if ids is None or words is None or ids.is_floating_point() or ids.dtype is torch.bool:
        return
    least, most = (int(x) for x in ids.aminmax())
    if least < 0 or most >= words:
        raise ValueError(
            f"Batch {index} of the dataloader has the token {least if least < 0 else most}, but "
            f"the model embeds the tokens 0 to {words - 1}, padding included. Use the tokenizer of "
            "the model."
        )
