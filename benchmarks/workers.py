"""Measurements in a process of their own: ``python workers.py '"task"' arguments…``.

Arguments are JSON, and so is the result, on the last line of the output.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import random_llama
import torch
from measure import MIB, Meter, alternate, cpu_seconds


def weights(scheme: str, size: str) -> dict[str, Any]:
    """Quantize and freeze a model by a scheme, beside a plain copy of its quantized weights."""
    from quark.torch import LLMTemplate, ModelQuantizer

    model = random_llama.build(size)
    values = random_llama.weights(model)
    largest = max(v.numel() * v.element_size() for v in values) / MIB
    copy = _copy_seconds(values)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme))
    with Meter() as meter:
        start = cpu_seconds()
        quantizer.quantize_model(model)
        between = cpu_seconds()
        quantizer.freeze(model)
        end = cpu_seconds()
    return {
        "scheme": scheme,
        "copy_s": copy,
        "quantize_s": between - start,
        "freeze_s": end - between,
        "copies": (end - start) / copy,
        "added_mib": meter.added,
        "largest_layers": None if meter.added is None else meter.added / largest,
    }


def _copy_seconds(values: list[torch.Tensor]) -> float:
    """Median CPU seconds of copying tensors to memory that is mapped already."""
    copies = [v.clone() for v in values]

    def copy() -> None:
        for target, value in zip(copies, values, strict=True):
            target.copy_(value)

    return alternate({"copy": copy}, rounds=5)["copy"]


def calibration(scheme: str, size: str, windows: int, rounds: int) -> dict[str, Any]:
    """Quantize by a static scheme, in turns with plain passes of the same data."""
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.quantization.preparation import restore_layers

    model = random_llama.build(size)
    data = random_llama.batches(size, windows)
    quantizer = ModelQuantizer(LLMTemplate.get("llama").get_config(scheme=scheme))

    @torch.no_grad()
    def forward() -> None:
        for batch in data:
            model(batch)

    def calibrate() -> None:
        quantizer.quantize_model(model, data)
        restore_layers(model)

    seconds = alternate({"forward": forward, "calibration": calibrate}, rounds)
    with Meter() as plain:
        forward()
    with Meter() as meter:
        quantizer.quantize_model(model, data)
        start = cpu_seconds()
        quantizer.freeze(model)
        freeze = cpu_seconds() - start
    return {
        "scheme": scheme,
        "forward_s": seconds["forward"],
        "calibration_s": seconds["calibration"],
        "forwards": seconds["calibration"] / seconds["forward"],
        "freeze_s": freeze,
        "forward_mib": plain.added,
        "added_mib": meter.added,
    }


def tensors(edge: int, rounds: int) -> list[dict[str, Any]]:
    """Time each numeric operation of every kind of tensor, in turns with ``tensor.clone()``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(edge, edge)
    return [_operations(name, spec, x, rounds) for name, spec in _specifications().items()]


def _specifications() -> dict[str, Any]:
    """Every kind of tensor that the schemes quantize, by its description."""
    from quark.torch.quantization.config import presets
    from quark.torch.quantization.config.description import describe

    found = {}
    for name in presets.scheme_names():
        if name.endswith(("_32", "_64")):
            continue  # one size of groups is enough
        layer = presets.scheme(name)
        for spec, is_weight in ((layer.weight, True), (layer.input_tensors, False)):
            if spec is not None:
                words = describe(spec, is_weight).removesuffix(" static")
                found[words] = spec.for_parameter() if is_weight else spec
    return dict(sorted(found.items()))


def _operations(name: str, spec: Any, x: torch.Tensor, rounds: int) -> dict[str, Any]:
    from quark.torch.numerics.packing import pack, unpack
    from quark.torch.numerics.qdq import (
        dequantize,
        dynamic_qparams,
        fake_quantize,
        fake_quantize_,
        quantize,
    )

    scheme, values = spec.scheme, x.clone()
    is_scaled, is_packed = scheme.fmt.scaled, scheme.fmt.word_codes > 1
    scales = dynamic_qparams(x, scheme) if is_scaled else (None, None)
    codes = quantize(x, *scales, scheme)
    packed = pack(codes, scheme.fmt)

    def fake() -> torch.Tensor:
        own = dynamic_qparams(x, scheme) if is_scaled and spec.is_dynamic else scales
        return fake_quantize(x, *own, scheme)

    work = {
        "clone": x.clone,
        "range": (lambda: dynamic_qparams(x, scheme)) if is_scaled else None,
        "quantize": lambda: quantize(x, *scales, scheme),
        "dequantize": lambda: dequantize(codes, *scales, scheme),
        "fake": fake,
        "in_place": lambda: fake_quantize_(values, *scales, scheme),
        "pack": (lambda: pack(codes, scheme.fmt)) if is_packed else None,
        "unpack": (lambda: unpack(packed, scheme.fmt, x.shape[-1])) if is_packed else None,
    }
    seconds = alternate({key: run for key, run in work.items() if run is not None}, rounds)
    clone = seconds.pop("clone")
    ratios = {key: seconds[key] / clone if key in seconds else None for key in list(work)[1:]}
    return {"tensor": name, "clone_ms": 1000 * clone, **ratios}


TASKS = {"weights": weights, "calibration": calibration, "tensors": tensors}

if __name__ == "__main__":
    logging.basicConfig()  # warnings only
    task, *arguments = map(json.loads, sys.argv[1:])
    print(json.dumps(TASKS[task](*arguments)))
