"""Functions in the language of Triton, which is imported when the first of them is needed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

_NOT_CONSTANT = ("rows", "steps")  # arguments whose values Triton does not compile for
_functions: dict[str, dict[str, Callable[..., Any]]] = {}  # by module and name


def triton_function(function: Callable[..., Any]) -> Any:
    """Mark a function that Triton compiles, after ``load_functions`` of its module."""
    _functions.setdefault(function.__module__, {})[function.__name__] = function
    return function


@lru_cache(maxsize=16)
def load_functions(module: ModuleType) -> bool:
    """Import Triton, and make functions of a module ready to be launched.

    They find the language of Triton as ``tl`` in their module. Functions that the module imports
    from another one are made ready too.

    Args:
        module: A module with functions that ``triton_function`` marks.

    Returns:
        Whether there is Triton.
    """
    if find_spec("triton") is None:
        log_once(
            "Triton is not installed (pip install triton): layers on this device unpack their "
            "weights at each use, and solvers launch ten operations for each column."
        )
        return False
    triton = import_module("triton")
    vars(module)["tl"] = import_module("triton.language")
    for name, function in _functions[module.__name__].items():
        vars(module)[name] = triton.jit(function, do_not_specialize=_NOT_CONSTANT)
    for name, function in list(vars(module).items()):
        owner = getattr(function, "__module__", None)
        if owner != module.__name__ and _functions.get(str(owner), {}).get(name) is function:
            other = sys.modules[str(owner)]
            load_functions(other)
            vars(module)[name] = vars(other)[name]
    return True


@lru_cache(maxsize=64)
def log_once(message: str) -> None:
    """Log a warning, once in this process."""
    logger.warning(message)


def launches_on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which Triton launches kernels on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
