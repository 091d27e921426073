"""A Python function that builds the model to quantize: ``--model_dir module:function``."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import wrong

if TYPE_CHECKING:
    from torch import fx, nn

_FLAG = "--model_dir"


def build_graph(entry: str, trusts_code: bool, batch: Mapping[str, Any] | None) -> fx.GraphModule:
    """Return the graph of the model that a function builds.

    Args:
        entry: ``module:function``. The module is imported as ``python -m`` would do. The function
            takes no arguments; it returns a model, or a model and a tuple of example arguments.
        trusts_code: Whether code of the model may run.
        batch: Batch of samples, the example where the function returns none.

    Raises:
        typer.BadParameter: Code may not run, there is no such function, it fails, or it returns
            something else; there is no example; or the model cannot be exported as a graph.
    """
    from quark.torch.quantization.graph_mode.tracing import trace_graph

    if not trusts_code:
        raise wrong(_FLAG, f"{entry} runs Python code. Allow that with --trust_remote_code.")
    model, args = _call(entry)
    if args is None:
        args = _arguments(model, batch)
    try:
        return trace_graph(model.eval(), args)
    except ValueError as error:
        raise wrong(_FLAG, str(error)) from error


def _call(entry: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Return the model that a function builds, and its example arguments or None."""
    from torch import nn

    with _working_directory_first():
        function = _resolve(entry)
        try:
            result = function()
        except Exception as error:  # anything that the function can raise
            raise wrong(_FLAG, f"{entry} failed: {type(error).__name__}: {error}") from error
    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, tuple) and len(result) == 2:
        model, args = result
        if isinstance(model, nn.Module) and isinstance(args, tuple):
            return model, args
    raise wrong(
        _FLAG,
        f"{entry} returned a {type(result).__name__}. Return an nn.Module, or (nn.Module, tuple of "
        "example arguments).",
    )


def _resolve(entry: str) -> Any:
    """Return the function that an entry names."""
    module = entry.partition(":")[0]
    try:
        function = pkgutil.resolve_name(entry)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module == missing or module.startswith(f"{missing}."):
            reason = "It is searched in the working directory and in the environment of Python."
            raise wrong(_FLAG, f"there is no module {module}. {reason}") from None
        raise wrong(_FLAG, f"{module} cannot be imported: {error}") from error
    except AttributeError as error:
        raise wrong(_FLAG, f"{entry}: {error}.") from None
    except Exception as error:  # anything that the module can raise
        raise wrong(
            _FLAG, f"{module} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise wrong(_FLAG, f"{entry} is a {type(function).__name__}. Give a function.")
    return function


@contextmanager
def _working_directory_first() -> Iterator[None]:
    """Let modules of the working directory be imported."""
    directory = str(Path.cwd())
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def _arguments(model: nn.Module, batch: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return a batch of samples by name as arguments by position."""
    if batch is None:
        raise wrong(
            _FLAG,
            "the function returned no example arguments, and there is no --dataset to take one "
            "from. Return (model, args), or give samples.",
        )
    try:
        bound = inspect.signature(model.forward).bind(**batch)
    except TypeError as error:
        names = ", ".join(batch)
        raise wrong("--dataset", f"the samples {names} do not fit the model: {error}.") from None
    if bound.kwargs:
        raise wrong(_FLAG, "the model takes arguments by keyword alone. Return (model, args).")
    return bound.args
