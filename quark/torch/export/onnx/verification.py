"""Verification of ONNX graphs: ONNX Runtime computes what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.cache import is_past
from quark.torch.export.onnx.inputs import ModelInputs
from quark.torch.export.onnx.runtime import PACKAGE, OnnxSession
from quark.torch.export.verification import Verdict, check_agreement, package_names, random_text
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.quantization.graph_mode.edges import edge_quantizers
from quark.torch.quantization.nn.layer import QuantizedLayer

_TEXT = ("input_ids", "attention_mask")
# Differences of the outputs of a graph as a share of how far these spread. Where floats are
# multiplied in float32, rounding costs 1e-5 at most. A value that is rounded, to codes or to half
# precision, may go either way: the median of the differences is 0.01 then, and 0.1 where the scale
# of a single layer is twice too large.
GRAPH_TOLERANCE = 1e-3  # of the largest
ROUNDED_TOLERANCE = 0.05  # of the median


def verify_graph(path: Path, model: nn.Module, inputs: Any = None) -> Verdict:
    """Run a graph and compare each of its outputs with that of the model.

    Args:
        path: The ONNX file.
        model: The model that was exported.
        inputs: Inputs as ``ModelExporter.export_onnx_model`` takes them; by default random tokens.

    Raises:
        ImportError: ONNX Runtime is missing.
        ValueError: The outputs differ, or the graph takes other inputs than tokens and there are no
            ``inputs``.
    """
    graph = OnnxSession(path)
    if inputs is None:
        named = [name for name in graph.inputs if not is_past(name)]
        if not {*named} <= {*_TEXT}:
            raise ValueError(f"{path.name} takes {', '.join(graph.inputs)}: pass inputs for them.")
        ids = random_text(model)
        inputs = {name: ids if name == _TEXT[0] else torch.ones_like(ids) for name in named}
    has_cache = any(map(is_past, graph.inputs))
    with eval_mode(model):
        bound = ModelInputs.bind(model, inputs, has_cache)
        expected = bound.run(model)[1]
    actual = graph.run(*bound.tensors.values())
    verdict = Verdict(package_names([PACKAGE]), 0.0, 0.0, _size(path), compared="outputs")
    rounds = bool(edge_quantizers(model)) or any(_rounds(module) for module in model.modules())
    verdicts = [
        _compare_outputs(ours.double().cpu(), theirs.double(), rounds, verdict)
        for ours, theirs in zip(expected, actual, strict=True)
    ]
    return max(verdicts, key=lambda v: v.difference)


def _compare_outputs(
    expected: torch.Tensor, actual: torch.Tensor, rounds: bool, verdict: Verdict
) -> Verdict:
    if not expected.numel():
        return verdict
    errors = (actual - expected).abs().masked_fill(actual == expected, 0)  # infinity is itself
    finite = expected[expected.isfinite()]
    spread = float(finite.std(correction=0)) or float(finite.abs().max())
    verdict = verdict._replace(difference=float(errors.max()), spread=spread)
    typical = float(errors.median()) <= ROUNDED_TOLERANCE * spread
    check_agreement(typical if rounds else verdict.difference <= GRAPH_TOLERANCE * spread, verdict)
    return verdict


def _rounds(module: nn.Module) -> bool:
    """Whether a module rounds what passes through it: to codes, or to half precision."""
    if any(p.is_floating_point() and p.itemsize == 2 for p in module.parameters(recurse=False)):
        return True
    if not isinstance(module, QuantizedLayer):
        return False
    config = module.quant_config
    return config.input_tensors is not None or config.output_tensors is not None


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
