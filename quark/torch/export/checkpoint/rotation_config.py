"""The part of the configuration that describes rotations in the forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace

import torch

from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.nn.packed import PackedLayer


def with_rotations(
    config: Config,
    rotations: Mapping[str, torch.Tensor],
    has_keys: bool = False,
    prescaled: Collection[str] = (),
    divided: Collection[str] = (),
) -> Config:
    """Return a configuration that names the layers with rotated inputs, as readers need it.

    They look at the first algorithm, and take the matrices for +-1 unless it is ``trainable``. What
    was learned is part of the weights, so that this says what is stored, not how it came about.

    Args:
        config: Configuration of the model.
        rotations: The rotation of the input of each such layer.
        has_keys: Whether queries and keys are rotated (R3).
        prescaled: Names of layers whose inputs are multiplied by factors before.
        divided: Names of layers with a low-rank branch, which always have factors.

    Raises:
        ValueError: The rotations differ in size or type, or some of these inputs alone are
            multiplied by factors, which a configuration cannot tell.
    """
    algorithms = config.algo_config or []
    found = next((a for a in algorithms if isinstance(a, RotationConfig)), None)
    if found is None and not rotations and not has_keys:
        return config
    like = found or RotationConfig(r1=False)
    kept = {f.name: getattr(like, f.name) for f in fields(RotationConfig)}
    written = RotationConfig(**{**kept, "name": RotationConfig.name, "r3": has_keys})
    kinds = {(len(rotation), rotation.is_floating_point()) for rotation in rotations.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"Inputs are rotated by matrices of several kinds {sorted(kinds)}: give rotation_size."
        )
    for size, is_float in kinds:
        written.rotation_size, written.trainable = size, is_float
        online = written.online_config or OnlineRotationConfig()
        plain = set(rotations) - set(divided)
        scaled = plain & set(prescaled)
        if len(scaled) not in (0, len(plain)):
            raise ValueError(
                f"The inputs of {len(scaled)} of {len(plain)} layers with rotated inputs are "
                "multiplied by factors: a configuration has use_input_prescale for all of them."
            )
        written.online_config = replace(
            online, online_rotation_layers=list(rotations), use_input_prescale=bool(scaled)
        )
    return replace(config, algo_config=[written, *(a for a in algorithms if a is not found)])


def rotates_keys(config: Config) -> bool:
    """Whether queries and keys are rotated under a configuration."""
    return any(a.r3 for a in _rotations(config))


def rotates_inputs(config: Config) -> bool:
    """Whether inputs of layers are rotated in the forward pass under a configuration."""
    return any(a.r4 or _online_layers(a) for a in _rotations(config))


def prescales_inputs(config: Config) -> bool:
    """Whether such inputs are multiplied by factors before they are rotated."""
    return any(_online_layers(a) and _has_prescale(a) for a in _rotations(config))


def _rotations(config: Config) -> list[RotationConfig]:
    return [a for a in config.algo_config or [] if isinstance(a, RotationConfig)]


def _online_layers(options: RotationConfig) -> list[str] | None:
    return options.online_config.online_rotation_layers if options.online_config else None


def _has_prescale(options: RotationConfig) -> bool:
    return options.online_config is not None and options.online_config.use_input_prescale


def declare_rotation(layer: PackedLayer, name: str, config: Config) -> None:
    """Declare the input rotation of a layer, if the configuration has one."""
    for options in _rotations(config):
        if _is_rotated(name, options):
            kind = torch.float64 if options.trainable else torch.int8
            layer.declare_rotation(options.rotation_size, kind)
            if _has_prescale(options):
                layer.declare_prescale()


def _is_rotated(name: str, options: RotationConfig) -> bool:
    online = _online_layers(options)
    if online is not None:
        return name in online
    return options.r4 and name.endswith("down_proj")  # earlier versions do not list them
