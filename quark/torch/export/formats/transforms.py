"""Rotations of inputs, as ``transform_config`` of compressed-tensors describes them.

A group of transforms has one matrix H, which is stored beside each layer of the group as
``<layer>.<group>_input.weight`` [n, n]. Inputs are multiplied by H / sqrt(n), each n of them alone,
before they are quantized. Rotations that are part of the weights ("weight_input",
"weight_output") need nothing when a checkpoint is loaded. Example of a group::

    "hadamard_64": {
        "type": "hadamard",
        "head_dim": 64,
        "apply": [{"targets": ["model.layers.0.mlp.down_proj"], "location": "input"}]
    }
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quark.torch.export.formats.config_section import read_choice, read_names, to_pattern

ROTATION = "input_rotation"  # name of the rotation of a layer in its state
SYLVESTER, STORED = "hadamard", "random-hadamard"  # types: computed by kernels, or read
_IN_WEIGHTS = ("weight_input", "weight_output")


class InputTransform(NamedTuple):
    """Inputs that are rotated by the matrix of a group.

    Attributes:
        group: Name of the group.
        targets: Names of layers, patterns of names, or "Linear".
        ignore: Those of layers that are left out.
        is_inverse: Whether the matrix is transposed.
        size: Order of the matrix, None for the number of inputs.
    """

    group: str
    targets: list[str]
    ignore: list[str]
    is_inverse: bool
    size: int | None

    def matches(self, name: str) -> bool:
        """Whether the inputs of a linear layer are rotated."""
        return _is_named(name, self.targets) and not _is_named(name, self.ignore)


def _is_named(name: str, targets: Sequence[str]) -> bool:
    patterns = ("*" if target == "Linear" else to_pattern(target) for target in targets)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read_transforms(section: Mapping[str, Any]) -> list[InputTransform]:
    """Return the transforms of inputs that a section describes.

    Raises:
        ValueError: It is malformed, or has transforms that are not supported.
    """
    config = section.get("transform_config") or {}
    groups = config.get("config_groups") if isinstance(config, dict) else None
    groups = {} if config == {} else groups
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(
            f"compressed-tensors: transform_config must map names to groups, got {config!r}."
        )
    transforms = []
    for name, group in groups.items():
        group = {"quant_method": f"transform_config of group {name}", **group}
        size = group.get("head_dim")
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"compressed-tensors: head_dim={size!r} of {name} is no size.")
        applied = group.get("apply") or []
        if not isinstance(applied, list) or not all(isinstance(each, dict) for each in applied):
            raise ValueError(f"compressed-tensors: apply of {name} is not a list of objects.")
        for each in applied:
            place = read_choice({**group, **each}, "location", ("input", *_IN_WEIGHTS), None)
            if place in _IN_WEIGHTS:
                continue
            read_choice(group, "type", (SYLVESTER, STORED), None)
            read_choice(group, "randomize", (False, True), False)
            is_inverse = read_choice({**group, **each}, "inverse", (False, True), False)
            targets, ignore = _names(each, "targets"), _names(each, "ignore")
            transforms.append(InputTransform(name, targets, ignore, is_inverse, size))
    for transform in transforms:
        transform.matches("")  # raises for expressions that are not supported
    return transforms


def _names(section: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names, of which one alone may be given as text."""
    value = section.get(key)
    return [value] if isinstance(value, str) else read_names(section, key)
