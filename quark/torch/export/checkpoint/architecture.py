"""The architecture that a checkpoint describes, built without values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.build_limit import check_counts, limit_build
from quark.torch.export.checkpoint.config_json import CONFIG, read_config_json

# Classes for configurations that name none, the first that knows the type of model.
_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModel",
)


def read_config(directory: Path, trust_remote_code: bool = False, **source: Any) -> Any:
    """Return the configuration of a model, without its quantization settings.

    Args:
        directory: Directory of the checkpoint.
        trust_remote_code: Passed to Transformers.
        source: Passed to Transformers, such as ``gguf_file``.

    Raises:
        ValueError: Transformers does not understand it, or it has counts that no model has.
    """
    from transformers import AutoConfig

    if not source and (directory / CONFIG).is_file():
        check_counts(read_config_json(directory), directory / CONFIG)
    try:
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True, **source
        )
    except Exception as error:
        raise _unreadable(directory / source.get("gguf_file", ""), error) from None
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

    check_counts(described, where)
    try:
        return AutoConfig.for_model(**described)
    except Exception as error:
        raise _unreadable(where, error) from None


def empty_model(
    config: Any, entries: Mapping[str, Any], where: Path, dtype: Any = None, **options: Any
) -> nn.Module:
    """Return the model that a configuration describes, on the meta device.

    Args:
        config: Configuration of the model.
        entries: Headers of the stored tensors, to check that the model is not far larger.
        where: Source of the configuration, for messages.
        dtype: Type of the model; by default the one in its configuration.
        options: Passed to Transformers.

    Raises:
        ValueError: The model would have far more parts than are stored, or cannot be built.
    """
    trusts = bool(options.pop("trust_remote_code", False))
    cls = model_class(config, where, trusts)
    if dtype is not None:
        options["dtype"] = dtype
    try:
        with torch.device("meta"), limit_build(entries, where):
            model: nn.Module = (
                cls.from_config(config, trust_remote_code=trusts, **options)
                if hasattr(cls, "_model_mapping")  # an Auto class
                else cls._from_config(config, **options)
            )
    except Exception as error:
        raise _unreadable(where, error) from None
    return model


def model_class(config: Any, where: Path, trust_remote_code: bool = False) -> Any:
    """Return the class of a model: the one that its configuration names, or one of ``_AUTO``.

    Args:
        config: Configuration of the model.
        where: Source of the configuration, for messages.
        trust_remote_code: Whether the class may be Python code of the directory.

    Raises:
        ValueError: Transformers has no such class, or it does not belong to the configuration.
    """
    import transformers

    auto_map = getattr(config, "auto_map", None) or {}
    known = _known_names()
    if trust_remote_code:
        remote = [n for n in (*_AUTO, *auto_map) if n in auto_map and n.startswith("AutoModel")]
        if remote and remote[0] in known:
            return getattr(transformers, remote[0])
    names = getattr(config, "architectures", None) or []
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{where}: architectures={names!r} is not a list of names of classes.")
    if not names:
        autos = [getattr(transformers, name) for name in _AUTO]
        return next((auto for auto in autos if type(config) in auto._model_mapping), autos[-1])
    found = getattr(transformers, names[0]) if names[0] in known else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(
            f"{where}: its architecture is {names[0]!r}, which Transformers "
            f"{transformers.__version__} does not have. "
            + ("Its code is in the directory: give --trust_remote_code." if auto_map else "")
            + ("" if auto_map else "Install a version that has it, or correct config.json.")
        )
    cls: Any = found
    if not (cls.config_class is None or isinstance(config, cls.config_class) or _maps(config, cls)):
        raise ValueError(
            f"{where}: config.json has model_type={config.model_type!r} and the architecture "
            f"{names[0]!r}, which takes {cls.config_class.model_type!r}. Correct one of them."
        )
    return cls


@cache
def _known_names() -> frozenset[str]:
    """Return the public names of Transformers; ``dir`` would take it a fifth of a second."""
    import transformers

    return frozenset(vars(transformers)["__all__"])


def _maps(config: Any, cls: type) -> bool:
    """Whether Transformers maps a type of configuration to a class that other types use too."""
    import transformers

    mappings = (getattr(transformers, name)._model_mapping for name in _AUTO)
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    return any(cls is one or (isinstance(one, tuple) and cls in one) for one in found)


def _described(directory: Path) -> dict[str, Any]:
    place = directory / CONFIG
    return dict(read_config_json(directory)) if place.is_file() else {}


def _unreadable(where: Path, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "model_type" in lines[0] and where.is_dir() and "_class_name" in _described(where):
        return ValueError(
            f"{where} is a part of a pipeline of diffusers: docs/other-models.md quantizes the "
            "pipeline in Python."
        )
    if "trust_remote_code=True" in str(error):
        return ValueError(
            f"{where} holds Python code, which builds the model. Read it; if you trust it, set "
            "trust_remote_code (--trust_remote_code)."
        )
    return ValueError(f"{where}: Transformers cannot build the model it describes: {lines[0]}")
