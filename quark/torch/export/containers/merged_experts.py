"""Experts of checkpoints, which Transformers and vLLM merge as they read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quark.torch.export.checkpoint_contents import Summary
from quark.torch.export.formats.compressed_tensors_targets import stack_of

_FLOAT = ""  # scheme of experts that are not quantized
_FP8 = re.compile(r"fp8_e4m3 per (tensor|channel) \| .*")
_PACKED = re.compile(r"u?int[2-8] per (group (\d+|row)|channel) sym( \(signed scales\))? \| ")
_MXFP4 = re.compile(r"fp4 per group 32 \(e8m0 scales\) \| .*")


def expert_schemes(summary: Summary, names: Iterable[str]) -> dict[str, set[str]]:
    """Return the schemes of the experts in each block, in words; "" for those in float.

    Args:
        summary: Contents of a checkpoint.
        names: Names of its tensors.
    """
    words = {
        layer.name: f"{layer.scheme.weight} | {layer.scheme.input}" for layer in summary.layers
    }
    floats = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    found: dict[str, set[str]] = {}
    for name in (*words, *floats):
        if stack := stack_of(name):
            found.setdefault(stack, set()).add(words.get(name, _FLOAT))
    return found


def reads_experts(config: Mapping[str, Any], summary: Summary, names: Iterable[str]) -> bool:
    """Whether Transformers computes what experts of a checkpoint are.

    Transformers 5.23 takes one scheme for all experts of a model. It looks for packed weights,
    those of NVFP4 without the scale of the tensor, and makes bfloat16 of MXFP4. Experts in float
    are read where everything is fp8.

    Args:
        config: ``config.json``, in compressed-tensors.
        summary: Contents of the checkpoint.
        names: Names of its tensors.
    """
    kinds = set().union(*expert_schemes(summary, names).values())
    if not (kinds and summary.layers):
        return True
    groups = list((config["quantization_config"].get("config_groups") or {}).values())
    targets = [target for group in groups for target in group["targets"]]
    is_found = any(target.startswith("re:") and "experts" in target for target in targets)
    if not (is_found or len(groups) == 1 or kinds == {_FLOAT}):
        return False
    layers = [f"{layer.scheme.weight} | {layer.scheme.input}" for layer in summary.layers]
    if all(map(_FP8.fullmatch, layers)):
        return True
    kind, *others = kinds
    if others:
        return False
    has_type = config.get("dtype") == "bfloat16" and _MXFP4.fullmatch(kind)
    return bool(_PACKED.fullmatch(kind) or _FP8.fullmatch(kind) or has_type)
