"""Batches of calibration data, of any documented kind: run, flattened, split, cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch import progress
from quark.torch.graph.float_products import float_products
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.processes import processes


class FixedArguments(tuple[Any, ...]):
    """A batch for a model that takes no other shapes, so that it is neither split nor cut."""


class FixedMapping(dict[str, Any]):
    """A batch of keyword arguments, likewise."""


class WholeBatches:
    """Batches that are neither split nor cut.

    Args:
        batches: Batches that can be iterated repeatedly.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        for batch in flatten_batches(self._batches):
            if hasattr(batch, "items"):
                yield FixedMapping(batch)
            else:
                yield FixedArguments([batch] if isinstance(batch, torch.Tensor) else batch)


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Call the model with one batch: a tensor, a mapping of arguments, or a list of either.

    Returns:
        The output of the model; of a list of batches, that of the last one.

    Raises:
        ValueError: The model uses an argument that the batch lacks.
    """
    device = _device_of(model)
    with float_products(), _missing_arguments(model):
        if isinstance(batch, torch.Tensor):
            return model(_to(batch, device))
        if hasattr(batch, "items"):
            return model(**{key: _to(value, device) for key, value in batch.items()})
        if isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], torch.Tensor):
            return model(*(_to(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        output = None
        for part in batch:
            output = run_batch(model, part)
        return output
    raise not_a_batch(batch)


@contextmanager
def _missing_arguments(model: nn.Module) -> Iterator[None]:
    """Say so where a model uses an argument that it was not given, which is None then.

    Raises:
        ValueError: It does.
    """
    try:
        yield
    except AttributeError as error:
        if "'NoneType' object" not in str(error):
            raise
        raise ValueError(
            f"{type(model).__name__} does not run on this data ({error}): it takes more arguments, "
            "such as pixel_values beside input_ids. Give batches that have them."
        ) from error


def _device_of(model: nn.Module) -> torch.device:
    """Return the device that takes the inputs of a model."""
    residency = residency_of(model)
    if residency is not None:
        device: torch.device = residency.device
        return device
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def not_a_batch(batch: Any) -> TypeError:
    """Return the error for something that is not a batch."""
    if isinstance(batch, str):
        advice = 'Tokenize the text: tokenizer(text, return_tensors="pt").'
    elif isinstance(batch, int):
        advice = "Make a tensor of token ids, with rows: torch.tensor([ids])."
    else:
        advice = "Give what the model is called with."
    kind = "None" if batch is None else f"a {type(batch).__name__}"
    return TypeError(
        f"A batch must be a tensor, a mapping of arguments or a list, got {kind}. {advice}"
    )


def flatten_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over batches for one call of the model each: a list of mappings is several.

    Batches without a row are left out.
    """
    for batch in batches:
        is_several = isinstance(batch, (list, tuple)) and not any(
            isinstance(part, torch.Tensor) for part in batch
        )
        if is_several:
            yield from flatten_batches(batch)
        elif not _is_empty(batch):
            yield batch


def _is_empty(batch: Any) -> bool:
    """Whether no tensor of a batch has an element."""
    tensors = [x for x in batch_values(batch) if isinstance(x, torch.Tensor) and x.dim()]
    return bool(tensors) and not any(x.numel() for x in tensors)


def batch_values(batch: Any) -> list[Any]:
    """Return the arguments in a batch for one call of the model."""
    values = batch.values() if hasattr(batch, "items") else batch
    return list(values) if hasattr(batch, "items") or isinstance(batch, (list, tuple)) else [values]


def split_sequences(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the sequences of batches in order, each as a batch of one sequence.

    Numbers, strings and tensors without axes are repeated for every sequence. A batch whose
    sequences are not along a common first axis stays whole: its tensors differ in size along the
    first axis, have no other axis, or are nested in other values.
    """
    for batch in flatten_batches(batches):
        count = count_sequences(batch)
        if count is None:
            yield batch
        else:
            yield from (_map_values(batch, partial(_row, index)) for index in range(count))


def join_sequences(sequences: list[Any]) -> Any:
    """Return one batch of sequences that have the same arguments and shapes; see ``Chunks``."""
    if len(sequences) == 1:
        return sequences[0]
    values = iter(zip(*map(batch_values, sequences), strict=True))

    def join(first: Any) -> Any:
        parts = next(values)
        is_whole = not isinstance(first, torch.Tensor) or not first.dim()
        return first if is_whole else torch.cat(parts)

    return _map_values(sequences[0], join)


def count_sequences(batch: Any) -> int | None:
    """Return the number of sequences of a batch, or None if it cannot be split."""
    if isinstance(batch, (FixedArguments, FixedMapping)):
        return None
    values = batch_values(batch)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    others = [value for value in values if not isinstance(value, torch.Tensor)]
    shapes = [tensor.shape for tensor in tensors if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    is_plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in others)
    if len(sizes) != 1 or not is_plain or any(len(shape) == 1 for shape in shapes):
        return None
    # Positions (3, sequences, tokens) of three sequences: the first axis may be another one.
    if any(
        len(x.shape) > 2 and len(x) == x.shape[1] and not x.is_floating_point() for x in tensors
    ):
        return None
    return int(sizes.pop())


def _row(index: int, value: Any) -> Any:
    is_whole = not isinstance(value, torch.Tensor) or not value.dim()
    return value if is_whole else value[index : index + 1]


def _map_values(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch for one call of the model with a function applied to each of its values."""
    if hasattr(batch, "items"):
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        make = getattr(batch, "_make", type(batch))  # a named tuple takes its items one by one
        return make(change(value) for value in batch)
    return change(batch)


def take_excerpt(batch: Any, tokens: int = 32) -> Any:
    """Return the first sequence of a batch, cut to its first tokens if it has nothing but tokens.

    Tokens are integers and masks of two axes, (sequences, tokens); padding before them is left out.
    Images, audio and embeddings stay whole, and with them the tokens, which may refer to them. If
    first axes differ, the batch stays whole: patches of all images, for instance, lie on one axis.
    """
    if isinstance(batch, (FixedArguments, FixedMapping)):
        return batch
    if isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], torch.Tensor):
        return take_excerpt(batch[0], tokens)
    tensors = [t for t in batch_values(batch) if isinstance(t, torch.Tensor) and t.dim()]
    if len({len(t) for t in tensors}) > 1:
        return batch
    shapes = {t.shape for t in tensors if _is_token_like(t)}
    has_only_tokens = all(t.dim() == 1 or t.shape in shapes for t in tensors)
    start = _find_start(batch)
    piece = slice(start, start + tokens) if has_only_tokens else slice(None)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        return value[:1, piece] if value.dim() == 2 else value[:1]

    return _map_values(batch, cut)


def _is_token_like(x: torch.Tensor) -> bool:
    """Whether a tensor may be tokens or a mask, (sequences, tokens)."""
    return x.dim() == 2 and not (x.is_floating_point() or x.is_complex())


def _find_start(batch: Any) -> int:
    """Return where the first sequence begins; repeated tokens at its front count as padding."""
    mask = padding_mask(batch)
    if mask is not None:
        return int(mask[0].int().argmax())
    ids = batch
    if not isinstance(batch, torch.Tensor):
        ids = next(iter(batch.values() if hasattr(batch, "values") else batch), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return 0
    repeated = int((ids[0] != ids[0, :1]).int().argmax())
    return repeated if repeated > 1 else 0


def padding_mask(batch: Any, name: str = "attention_mask") -> torch.Tensor | None:
    """Return which tokens of a batch are not padding, (sequences, tokens) bool; None for all.

    In a mask of more axes, (sequences, ..., queries, keys), padding are the keys that no query may
    read. Such a mask holds True or 1 where reading is allowed, or 0 in the type of the model.

    Args:
        batch: A batch for one call of the model.
        name: Argument that is the mask.
    """
    mask = batch.get(name) if hasattr(batch, "get") else None
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2:
        return None
    if mask.dim() > 2:
        allowed = mask == 0 if mask.is_floating_point() else mask != 0
        mask = allowed.flatten(1, -2).any(1)
    return None if bool(mask.all()) else mask.bool()


def show_progress(items: Any, what: str) -> Any:
    """Show the progress of an iteration; only the first of several processes does.

    See ``quark.torch.progress``.
    """
    return progress.show_progress(items, what, is_shown=processes().is_first)


def _to(value: Any, device: torch.device) -> Any:
    """Return a value as an argument of the model: tensors on a device, none of inference mode."""
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.to(device)
    return moved.clone() if moved.is_inference() else moved
