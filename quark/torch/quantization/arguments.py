"""Checks of the kinds of arguments of ``ModelQuantizer``, before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig


def check_config(config: Any) -> None:
    """Check that a configuration is a ``Config``.

    Raises:
        TypeError: It is not. The message has the call that makes one.
    """
    if isinstance(config, Config):
        return
    if isinstance(config, dict):
        advice = "give Config.from_dict(config)."
    elif isinstance(config, QuantizationConfig):
        advice = "give Config(global_quant_config=config)."
    else:
        scheme = config if isinstance(config, str) and config.isidentifier() else "int4_wo_128"
        advice = f"make one: LLMTemplate.get(model.config.model_type).get_config({scheme!r})."
    raise TypeError(f"ModelQuantizer takes a Config, got {_kind_of(config)}: {advice}")


def check_module(model: Any) -> None:
    """Check that a model is a module of torch.

    Raises:
        TypeError: It is not. The message has the way to one.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, (str, Path)):
        advice = f"load it first: AutoModelForCausalLM.from_pretrained({str(model)!r})."
    elif isinstance(model, type):
        advice = f"make one: {model.__name__}.from_pretrained(DIRECTORY)."
    elif isinstance(getattr(model, "model", None), nn.Module):
        advice = "give its model, in .model."
    elif isinstance(model, (list, tuple)):
        advice = "give the model first, then the batches."
    else:
        advice = "give a model of torch, such as that of AutoModelForCausalLM.from_pretrained."
    raise TypeError(f"The model must be a torch.nn.Module, got {_kind_of(model)}: {advice}")


def _kind_of(value: Any) -> str:
    """Describe a value in a message: "None", "a dict", or "the class Linear"."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
