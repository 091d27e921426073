"""Graphs run by ONNX Runtime on a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

PACKAGE = "onnxruntime"
# Products of integer weights add up in float, and no kernel saturates.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1", "session.x64quantprecision": "1"}
# Where operators are fused, it does not load bytes that two products share under the last of these.
_LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_BASIC")
_SILENT = 4


def check_runtime() -> None:
    """Raise if ONNX Runtime is missing.

    Raises:
        ImportError: It is.
    """
    if find_spec(PACKAGE) is None:
        raise ImportError(
            "Verification opens ONNX files with ONNX Runtime: pip install onnxruntime, or export "
            "without verification."
        )


def check_runnable(model: nn.Module) -> None:
    """Raise if ONNX Runtime is missing or cannot run the graph of a model.

    Raises:
        ImportError: It is missing.
        ValueError: The model is in a type in which it computes nothing.
    """
    check_runtime()
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        raise ValueError(
            "Verification runs ONNX files in ONNX Runtime, which computes nothing in bfloat16 on a "
            "CPU, and the model is in bfloat16: load it in float32 or float16, or export without "
            "verification."
        )


class Graph:
    """An ONNX file, loaded with settings under which integers are multiplied exactly.

    Args:
        path: The file.

    Raises:
        ValueError: ONNX Runtime does not load it.
    """

    def __init__(self, path: Path) -> None:
        check_runtime()
        problem: Exception | None = None
        for level in _LEVELS:
            try:
                self._session = _session(path, level)
                break
            except Exception as error:  # it has its own classes, which no module names for all
                problem = error
        else:
            raise ValueError(f"ONNX Runtime does not load {path.name}: {problem}") from problem
        self.inputs: list[str] = [value.name for value in self._session.get_inputs()]

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs for inputs in the order of ``self.inputs``."""
        given = dict(zip(self.inputs, (x.detach().cpu().numpy() for x in inputs), strict=True))
        return [torch.from_numpy(y) for y in self._session.run(None, given)]


def _session(path: Path, level: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for key, value in EXACT.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
