"""Models of architectures that Transformers does not know, by the names and shapes of the tensors.

A matrix called ``….weight`` is taken for the weight of a linear layer, unless its rows are those of
a vocabulary or its name is that of an embedding. Everything else stays as it is.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.config_json import read_config_json
from quark.torch.export.checkpoint.files import TensorHeader

logger = logging.getLogger("quark")

_EMBEDDING = re.compile(r"emb|wte|wpe")  # in the last part of the name of a module


class StoredModel(nn.Module):
    """Modules with the tensors of a checkpoint, which cannot run.

    Args:
        entries: Headers of the tensors.
        config: ``config.json``. Embeddings and output head have ``vocab_size`` rows.

    Raises:
        ValueError: A name does not name a tensor of a module.
    """

    def __init__(self, entries: Mapping[str, TensorHeader], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config
        inner = config.get("text_config")
        vocabulary = {**(inner if isinstance(inner, dict) else {}), **config}.get("vocab_size")
        matrices = {n: e for n, e in entries.items() if _is_matrix(n, e)}
        heads = [
            name
            for name, entry in matrices.items()
            if entry.shape[0] == vocabulary and not (_is_embedding(name) or _is_numbered(name))
        ]
        # Of several matrices with as many rows as the vocabulary, none is known to be the head.
        self._head = heads[0].removesuffix(".weight") if len(heads) == 1 else None
        for name, entry in entries.items():
            is_linear = name in matrices and not _is_embedding(name)
            self._add(name, entry, is_linear and (name not in heads or len(heads) == 1))

    def _add(self, name: str, entry: TensorHeader, is_linear: bool) -> None:
        owner, _, own = name.rpartition(".")
        try:
            module = self._module(owner, entry if is_linear else None)
            empty = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            if own in module._parameters:
                del module._parameters[own]
            module.register_parameter(own, nn.Parameter(empty, requires_grad=False))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{name!r} is not the name of a tensor of a module: {error}") from None

    def _module(self, name: str, weight: TensorHeader | None) -> nn.Module:
        """Return a module, made with the modules around it if it is not there yet."""
        if not name:
            return self
        above, _, own = name.rpartition(".")
        parent = self._module(above, None)
        present = parent._modules.get(own)
        if present is not None and (weight is None or isinstance(present, nn.Linear)):
            return present
        made = nn.Module() if weight is None else _linear(weight)
        if present is not None:  # its bias came first
            made._parameters.update(present._parameters)
            made._modules.update(present._modules)
            del parent._modules[own]
        parent.add_module(own, made)
        return made

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output head, None if it is not known."""
        return None if self._head is None else self.get_submodule(self._head)


def stored_model(directory: Path, entries: Mapping[str, TensorHeader]) -> StoredModel:
    """Return the model of a directory by the names and shapes of its tensors.

    Args:
        directory: Directory of the model.
        entries: Headers of its tensors.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: A name does not name a tensor of a module.
    """
    model = StoredModel(entries, read_config_json(directory))
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    rest = {name for name in entries if name.rpartition(".")[0] not in linear}
    logger.warning(
        "%s: Transformers does not know this architecture, so layers are told by names and shapes. "
        "Linear layers: %s. Not quantized: %s. Exclude what is no linear layer.",
        directory,
        _summary(linear),
        _summary(rest),
    )
    return model


def _linear(weight: TensorHeader) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.register_parameter("bias", None)
    return made


def _is_matrix(name: str, entry: TensorHeader) -> bool:
    is_float = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
    return name.endswith(".weight") and len(entry.shape) == 2 and is_float


def _is_embedding(name: str) -> bool:
    return _EMBEDDING.search(name.split(".")[-2].lower()) is not None


def _is_numbered(name: str) -> bool:
    """Whether a tensor is in a numbered block."""
    return any(part.isdecimal() for part in name.split("."))


def _summary(names: Iterable[str]) -> str:
    """Return names with * for numbers, and how many there are of each: ``layers.*.up (32)``."""
    counts = Counter(re.sub(r"\d+", "*", name) for name in sorted(names))
    return ", ".join(f"{name} ({count})" for name, count in counts.items()) or "none"


def is_known(described: Mapping[str, Any]) -> bool:
    """Whether Transformers has the architecture of a ``config.json``."""
    import transformers

    names = described.get("architectures")
    kind = described.get("model_type")
    named = isinstance(names, list) and bool(names) and isinstance(names[0], str)
    is_class = not named or hasattr(transformers, names[0])  # type: ignore[index]
    return kind in transformers.CONFIG_MAPPING and is_class
