"""The mark by which models of Transformers know that they are quantized.

Transformers sets it when it loads a quantized model. Jamba and FalconMamba compute another product
then: they call ``dt_proj``, whose weight a float model multiplies by itself. So a model has the
mark wherever it is quantized, and while data runs through it for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

MARK = "_is_quantized"  # of configurations; the code of models asks whether it exists


def set_mark(model: nn.Module) -> list[Any]:
    """Mark the configurations of a model and of the models in it; return those without it before.

    Modules that are not of Transformers have none.
    """
    models = [module for module in model.modules() if hasattr(module, "_init_weights")]
    configs = {id(c): c for m in models if hasattr(c := getattr(m, "config", None), "__dict__")}
    unmarked = [config for config in configs.values() if MARK not in vars(config)]
    for config in unmarked:
        setattr(config, MARK, True)
    return unmarked


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """Mark a float model while the context is open."""
    unmarked = set_mark(model)
    try:
        yield
    finally:
        for config in unmarked:
            vars(config).pop(MARK, None)
