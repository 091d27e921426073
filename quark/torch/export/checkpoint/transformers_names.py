"""Names of tensors in checkpoints of Transformers that differ from those of the model.

Transformers renames and fuses tensors of some architectures when it loads them (the experts of
Mixtral become one tensor) and undoes that when it saves; what is exported is in the saved form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, cast

import torch
from torch import nn

from quark.torch.export.checkpoint.files import TensorHeader


def rename_for_model(reader: Any, model: nn.Module) -> Any:
    """Return a reader with the names and shapes of ``model``; ``reader`` itself if it has them.

    Args:
        reader: Tensors of a checkpoint.
        model: The float architecture, before any layer is replaced.
    """
    if not hasattr(model, "save_pretrained"):
        return reader
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return reader
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    return ConvertedReader(reader, model, renamings, converters) if transforms else reader


def remember_conversions(model: nn.Module, reader: Any) -> None:
    """Let a model remember how its names differ from those of the files, as if it were loaded.

    Transformers undoes these conversions when the model is saved.

    Args:
        model: A model of Transformers.
        reader: Result of ``rename_for_model`` for the model.
    """
    transforms = reader.transforms if isinstance(reader, ConvertedReader) else []
    used = [transform for transform in transforms if transform.was_used()]
    model._weight_conversions = used  # type: ignore[assignment]


def split_or_fused(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of tensors that Transformers splits or fuses when it saves a model.

    Args:
        model: A model after ``remember_conversions``.
        names: Names of tensors in the model.
    """
    used: list[Any] = getattr(model, "_weight_conversions", None) or []
    reverse = [conversion.reverse_transform() for conversion in reversed(used)]
    converters = [conversion for conversion in reverse if hasattr(conversion, "operations")]
    if not converters:
        return set()
    from transformers.core_model_loading import apply_converters

    return {name for name in names if apply_converters(name, converters)[1] is not None}


def saved_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return module names as a checkpoint stores them."""
    names = list(names)
    if not hasattr(model, "save_pretrained"):
        return names
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings
    except ImportError:
        return names
    renamings = [
        transform.reverse_transform()
        for transform in reversed(get_model_conversion_mapping(model, add_legacy=False))
        if isinstance(transform, WeightRenaming) and not isinstance(transform, PrefixChange)
    ]
    return [apply_renamings(f"{name}.weight", renamings).removesuffix(".weight") for name in names]


class ConvertedReader:
    """Tensors of another reader, renamed and fused for a model of Transformers.

    Attributes:
        entries: Headers by the names of the model, computed without reading values.
        metadata: Texts in the headers of the files.
    """

    def __init__(
        self, reader: Any, model: Any, renamings: list[Any], converters: list[Any]
    ) -> None:
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        self.reader, self.model = reader, model
        self.metadata: dict[str, str] = getattr(reader, "metadata", {})
        self.transforms = [*renamings, *converters]
        self.patterns = {pattern: c for c in converters for pattern in c.source_patterns}
        self.names: dict[str, tuple[str, str | None]] = {}  # stored name -> name, pattern
        self.parts: dict[str, list[str]] = {}  # first name of a fused tensor -> stored names
        self.made_of: dict[str, str] = {}  # name of a fused tensor -> first name
        modules, state = {name for name, _ in model.named_modules()}, model.state_dict()
        prefix = getattr(model, "base_model_prefix", "") or None
        self.entries: dict[str, TensorHeader] = {}
        self.stored: dict[str, str] = {}  # name -> stored name, of tensors that are not fused
        for key in sorted(reader.entries, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            is_known = key in state or (name not in state and key.rpartition(".")[0] in modules)
            if pattern is None and is_known:
                name = key  # it fits as it is
            elif pattern is not None and name not in state:
                whole, _ = rename_source_key(key, renamings, [], prefix, state)
                if whole in state:  # experts that are not stacked in this model
                    name, pattern = whole, None
            self.names[key] = name, pattern
            if pattern is None:
                self._add(name, key)
            else:
                self.parts.setdefault(name, []).append(key)
        for name, keys in self.parts.items():
            headers = {key: reader.entries[key] for key in keys}
            empty = {
                key: torch.empty(header.shape, dtype=header.dtype, device="meta")
                for key, header in headers.items()
            }
            file = headers[keys[0]].file
            try:
                made = self._fuse(name, empty)
            except Exception as error:
                raise ValueError(
                    f"{name} cannot be made of the {len(keys)} stored tensors {keys[0]} …: one is "
                    f"missing, or their shapes differ ({str(error).splitlines()[0]})."
                ) from None
            for target, tensor in made.items():
                self.entries[target] = TensorHeader(file, tuple(tensor.shape), tensor.dtype)
                self.made_of[target] = name

    def _add(self, name: str, key: str) -> None:
        """Add a stored tensor under its name in the model.

        Raises:
            ValueError: Another tensor has this name.
        """
        other = self.stored.setdefault(name, key)
        if other != key:
            raise ValueError(
                f"{other} and {key} are the same tensor of the model: remove one of them, or copy "
                "the checkpoint again."
            )
        self.entries[name] = self.reader.entries[key]

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor by its name in the model."""
        if key in self.stored:
            return cast(torch.Tensor, self.reader.tensor(self.stored[key]))
        name = self.made_of[key]
        parts = {part: self.reader.tensor(part) for part in self.parts[name]}
        return self._fuse(name, parts)[key]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors. Parts of a fused tensor are held until the last one is read."""
        waiting: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.parts}
        for key, tensor in self.reader.tensors():
            name, pattern = self.names[key]
            if pattern is None:
                yield name, tensor
                continue
            waiting[name][key] = tensor
            if len(waiting[name]) == len(self.parts[name]):
                yield from self._fuse(name, waiting.pop(name)).items()

    def _fuse(self, name: str, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        transform: Any = None
        for key in self.parts[name]:
            pattern = self.names[key][1]
            transform = transform or deepcopy(self.patterns[pattern])
            transform.add_tensor(name, key, pattern, parts[key])
        made = transform.convert(name, model=self.model, config=self.model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}
