"""The architecture that a checkpoint describes, built without values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

MAX_MODULES = 4096  # of a kind, in a checkpoint with fewer tensors
_COUNTS = re.compile(r"^(num|n)_.*(layer|expert|block)")


def read_config(directory: Path, trust_remote_code: bool = False, **source: Any) -> Any:
    """Return the configuration of a model, without its quantization settings.

    Args:
        directory: Directory of the checkpoint.
        trust_remote_code: Passed to Transformers.
        source: Passed to Transformers, such as ``gguf_file``.

    Raises:
        ValueError: Transformers does not understand it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True, **source
        )
    except Exception as error:
        raise _unreadable(directory, error) from None
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def made_config(described: dict[str, Any], where: Path) -> Any:
    """Return the configuration of a model from what its ``to_dict`` gave.

    Args:
        described: That, with ``model_type``.
        where: Where it comes from, for messages.

    Raises:
        ValueError: Transformers does not understand it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**described)
    except Exception as error:
        raise _unreadable(where, error) from None


def check_counts(config: Any, entries: Mapping[str, Any], where: Path) -> None:
    """Check that a model does not have far more modules than tensors are stored.

    Building such a model, from a damaged ``config.json``, would never end.

    Args:
        config: Configuration of the model.
        entries: Headers of the stored tensors.
        where: Source of the configuration, for messages.

    Raises:
        ValueError: It does.
    """
    most = max(MAX_MODULES, len(entries))
    for key, value in config.get_text_config().to_dict().items():
        if _COUNTS.match(key) and isinstance(value, int) and value > most:
            raise ValueError(f"{where}: {key}={value}, but only {len(entries)} tensors are stored.")


def empty_model(
    config: Any, entries: Mapping[str, Any], where: Path, dtype: Any = None, **options: Any
) -> nn.Module:
    """Return a causal language model on the meta device.

    Args:
        config: Configuration of the model.
        entries: Headers of the stored tensors, to check that the model is not far larger.
        where: Source of the configuration, for messages.
        dtype: Type of the model; by default the one in its configuration.
        options: Passed to Transformers.

    Raises:
        ValueError: The model would have far more parts than are stored, or cannot be built.
    """
    from transformers import AutoModelForCausalLM

    check_counts(config, entries, where)
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, **options, **({} if dtype is None else {"dtype": dtype})
            )
    except Exception as error:
        raise _unreadable(where, error) from None
    return model


def _unreadable(where: Path, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"{where}: Transformers cannot build the model it describes: {lines[0]}")
