"""Export of a model as a graph, with errors that say where it fails."""

from __future__ import annotations

import io
import logging
import sys
import traceback
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.quantization.config.value_types import check_types

logger = logging.getLogger(__name__)

_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[3])


def trace_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
) -> fx.GraphModule:
    """Return the graph of a model in evaluation mode.

    Args:
        model: A float model. It is not changed.
        args: Example of the arguments.
        kwargs: Example of keyword arguments.
        dynamic_shapes: Axes that may have any size, as ``torch.export.export`` takes them.

    Raises:
        TypeError: The arguments are not a tuple, or the keyword arguments not a dict.
        ValueError: The model cannot be traced. The message has the line of its code.
    """
    if not isinstance(args, tuple):
        raise TypeError(f"args: expected a tuple of arguments, got a {type(args).__name__}.")
    check_types(dict | None, kwargs=kwargs)
    printed = io.StringIO()  # torch prints the graph so far if it fails
    try:
        with eval_mode(model), redirect_stderr(printed):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
            graph = program.module()
    except Exception as error:  # anything that a model can raise
        logger.debug("%s", printed.getvalue())
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{type(model).__name__} cannot be exported as a graph{_place(error)}: "
            f"{type(error).__name__}: {reason} See torch.export.export; models whose control flow "
            "depends on values are quantized with quant_mode=eager_mode."
        ) from error
    sys.stderr.write(printed.getvalue())
    return graph


def _place(error: BaseException) -> str:
    """Return where the code of a model raised an error, or ""."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(package in Path(frame.filename).parents for package in _PACKAGES)
        and Path(frame.filename).suffix == ".py"
    ]
    if not frames:
        return ""
    last = frames[-1]
    return f", at {last.filename}:{last.lineno}, {last.line!r}"
