"""Running a model on batches of any documented kind, without chance or memory of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn


def run_batch(model: nn.Module, batch: Any) -> None:
    """Call the model with one batch: a tensor, a mapping of arguments, or a list of either."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, torch.Tensor):
        model(batch.to(device))
    elif hasattr(batch, "items"):
        model(**{key: _to(value, device) for key, value in batch.items()})
    elif isinstance(batch, (list, tuple)) and batch and isinstance(batch[0], torch.Tensor):
        model(*(_to(value, device) for value in batch))
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            run_batch(model, part)
    else:
        raise TypeError(
            f"A batch must be a tensor, a mapping of arguments or a list, got {type(batch)}."
        )


def parts(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over what the model is called with once: a list of mappings is several."""
    for batch in batches:
        is_several = isinstance(batch, (list, tuple)) and not any(
            isinstance(part, torch.Tensor) for part in batch
        )
        if is_several:
            yield from parts(batch)
        else:
            yield batch


def sequences(batches: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the sequences of batches in order, each as a batch of one.

    Values that are no tensors, and tensors without axes, go with every sequence. A batch that does
    not tell its sequences apart stays whole: its tensors differ in length along the first axis, or
    have no other axis, or lie within other values.
    """
    for batch in parts(batches):
        count = _sequences(batch)
        if count is None:
            yield batch
        else:
            yield from (_changed(batch, partial(_row, index)) for index in range(count))


def _sequences(batch: Any) -> int | None:
    """Return the number of sequences of a batch, or None if it does not tell them apart."""
    values = list(batch.values()) if hasattr(batch, "items") else batch
    values = values if isinstance(values, (list, tuple)) else [values]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    others = [value for value in values if not isinstance(value, torch.Tensor)]
    shapes = [tensor.shape for tensor in tensors if tensor.dim()]
    sizes = {shape[0] for shape in shapes}
    is_plain = all(value is None or isinstance(value, (bool, int, float, str)) for value in others)
    if len(sizes) != 1 or not is_plain or any(len(shape) == 1 for shape in shapes):
        return None
    return int(sizes.pop())


def _row(index: int, value: Any) -> Any:
    is_whole = not isinstance(value, torch.Tensor) or not value.dim()
    return value if is_whole else value[index : index + 1]


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch that calls the model once, with each of its values changed."""
    if hasattr(batch, "items"):
        return {key: change(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(change(value) for value in batch)
    return change(batch)


def repeatable(batches: Iterable[Any] | None) -> Iterable[Any]:
    """Return batches that can be run through more than once; those of an iterator are kept."""
    if batches is None:
        return ()
    return list(batches) if iter(batches) is batches else batches


def excerpt(batch: Any, tokens: int = 32) -> Any:
    """Return the beginning of the first sequence of a batch, without the padding before it.

    Tensors of two axes are taken for (sequences, tokens); others are cut along the first alone.
    """
    if isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], torch.Tensor):
        return excerpt(batch[0], tokens)
    start = _start(batch)
    piece = slice(start, start + tokens)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value[:1, piece] if value.dim() == 2 else value[:1]

    return _changed(batch, cut)


def _start(batch: Any) -> int:
    """Return where the first sequence begins; tokens alike at its front are taken for padding."""
    mask = padding_mask(batch)
    if mask is not None:
        return int(mask[0].int().argmax())
    ids = batch
    if not isinstance(batch, torch.Tensor):
        ids = next(iter(batch.values() if hasattr(batch, "values") else batch), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return 0
    alike = int((ids[0] != ids[0, :1]).int().argmax())
    return alike if alike > 1 else 0


def padding_mask(batch: Any) -> torch.Tensor | None:
    """Return which tokens of a batch are not padding, (sequences, tokens) bool, or None for all."""
    mask = batch.get("attention_mask") if hasattr(batch, "get") else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or bool(mask.all()):
        return None
    return mask.bool()


def progress(items: Any, what: str) -> Any:
    """Show progress on a terminal once it has taken a second."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=what, delay=1.0, disable=None, leave=False)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
