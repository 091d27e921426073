"""Running ONNX files in ONNX Runtime on a CPU."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

PACKAGE = "onnxruntime"
# Products of integer weights accumulate in float32, and no kernel saturates.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1", "session.x64quantprecision": "1"}
# With extended optimizations ONNX Runtime fails to load 8-bit weights that two products share, so
# basic optimizations are tried next.
_LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_BASIC")
_SILENT = 4


def check_runtime(dtypes: Collection[str] = ()) -> None:
    """Check that ONNX Runtime is installed and can run a model.

    Args:
        dtypes: Names of the types of its parameters.

    Raises:
        ImportError: It is missing.
        ValueError: It does not compute in one of these types.
    """
    if find_spec(PACKAGE) is None:
        raise ImportError(
            "ONNX files are verified with ONNX Runtime: pip install onnxruntime, or leave out "
            "verification."
        )
    if "bfloat16" in dtypes:
        raise ValueError(
            "the model is in bfloat16, in which ONNX Runtime computes nothing on a CPU, so it "
            "cannot be verified in bfloat16: load it in float32 or float16, or leave out "
            "verification."
        )


class OnnxSession:
    """An ONNX file in ONNX Runtime, with settings for exact integer products.

    Args:
        path: Path of the file.

    Raises:
        ValueError: ONNX Runtime cannot load the file.
    """

    def __init__(self, path: Path) -> None:
        check_runtime()
        self._name = path.name
        problem: Exception | None = None
        for level in _LEVELS:
            try:
                self._session = _open_session(path, level)
                break
            except Exception as error:  # ONNX Runtime has no common base class of errors
                problem = error
        else:
            raise ValueError(f"ONNX Runtime does not load {path.name}: {problem}") from problem
        self.inputs: list[str] = [value.name for value in self._session.get_inputs()]

    def run(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs for inputs in the order of ``self.inputs``.

        Raises:
            ValueError: ONNX Runtime cannot compute them: the file is damaged, or an input is wrong.
        """
        given = dict(zip(self.inputs, (x.detach().cpu().numpy() for x in inputs), strict=True))
        try:
            outputs = self._session.run(None, given)
        except Exception as error:  # see above: no common base class
            raise ValueError(f"ONNX Runtime does not run {self._name}: {error}") from error
        return [torch.from_numpy(y) for y in outputs]


def _open_session(path: Path, level: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for key, value in EXACT.items():
        options.add_session_config_entry(key, value)
    # A second attempt with the same provider would print to the standard output.
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], enable_fallback=0
    )
