"""The configuration that describes a quantized model: its own, or one that an export is given.

A reader unpacks codes by the configuration in ``config.json``. Codes of uint4 that are read as int4
are other values, without any error, so a given configuration is compared with each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from quark.torch.export.checkpoint.rotation_config import rotates_inputs
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.description import describe
from quark.torch.quantization.config.layer import TENSORS
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.resolution import resolve_names
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.group_fit import fit_group_sizes, fit_super_blocks
from quark.torch.quantization.nn.layer import QuantizedLayer

# Fields of a specification that decide how values become codes, and not what codes mean: a reader
# of parameters has no use for them, and messages leave them out.
_UNREAD = {
    "enable_buffer_reuse",
    "max_input_numel",
    "observer_cls",
    "qat_spec",
    "round_method",
    "scale_calculation_mode",
    "signed_scales",
}
_ADVICE = (
    "Leave quant_config out, because the model remembers how it was quantized, or give the "
    "configuration that it was quantized with."
)


def described_config(model: nn.Module, given: Config | None) -> Config:
    """Return a configuration that describes every quantized layer of a model.

    A given one that equals what the model was quantized with stands for what the model remembers,
    which has the names of its modules and the layers that stayed in float. Groups and super-blocks
    of another one are fitted to the model, as they are before it is quantized.

    Args:
        model: A quantized model.
        given: The configuration that an export was given, or None.

    Raises:
        ValueError: None is given and the model remembers none, or a layer is quantized, or its
            input rotated, in another way than the given one says.
    """
    own = _remembered(model)
    if given is None and own is None:
        raise ValueError("Pass quant_config: the model does not remember how it was quantized.")
    if own is not None and (given is None or given == getattr(model, "_given_config", None)):
        return own
    assert given is not None
    config = resolve_names(given, model)
    for fit in (fit_super_blocks, fit_group_sizes):
        config, _ = fit(model, config)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    check_described(layers, config)
    if rotates_inputs(config) and all(x.input_rotation is None for x in layers.values()):
        raise ValueError(
            "quant_config rotates inputs (r4, or online_config), but the model rotates none. "
            + _ADVICE
        )
    return config


def _remembered(model: nn.Module) -> Config | None:
    """Return the configuration that quantization or Transformers stored on a model."""
    of_transformers = getattr(getattr(model, "config", None), "quantization_config", None)
    for holder in (model, of_transformers):
        config = getattr(holder, "quant_config", None)
        if isinstance(config, Config):
            return config
    return None


def check_described(layers: Mapping[str, QuantizedLayer], config: Config) -> None:
    """Check that a configuration says how each tensor of some layers is quantized.

    Args:
        layers: Quantized layers by name.
        config: The configuration, with the names of the model.

    Raises:
        ValueError: One is quantized in another way, or is in float under the configuration.
    """
    for name, layer in layers.items():
        stated = config_for(name, layer.float_class, config) or QuantizationConfig()
        for tensor in TENSORS:
            own, other = getattr(layer.quant_config, tensor), getattr(stated, tensor)
            shape = layer.shape(tensor) if own is not None and tensor in PARAMETERS else None
            if own is not other and _meaning(own, shape) != _meaning(other, shape):
                texts = _texts(own, other)
                raise ValueError(
                    f"{name}.{tensor}: quant_config says {texts[1]}, but it is quantized with "
                    f"{texts[0]}. {_ADVICE}"
                )


def _meaning(spec: QuantizationSpec | None, shape: tuple[int, ...] | None) -> Any:
    """Return what a reader needs to know of a tensor; equal for equal values of equal codes.

    Args:
        spec: Specification of the tensor, None in float.
        shape: Shape of a parameter; None for inputs and outputs, which a reader quantizes anew.
    """
    if spec is None:
        return None
    if shape is None:
        return [stage.scheme for stage in spec.stages], bool(spec.is_dynamic)
    stages = []
    for stage in spec.for_parameter().stages:
        scheme = stage.scheme
        kind = scheme.qscheme, scheme.symmetric, scheme.float_zero_point, stage.is_scale_quant
        stages.append((scheme.fmt, scheme.scale, kind, scheme.blocks(shape)))
    return stages


def _texts(own: QuantizationSpec | None, other: QuantizationSpec | None) -> tuple[str, str]:
    """Return texts of two specifications: the fields that differ, or that one is in float."""
    if own is None or other is None:
        return _text_of(own), _text_of(other)
    first, second = _fields(own), _fields(other)
    names = [name for name in sorted(first | second) if first.get(name) != second.get(name)]
    sides = ([f"{name}={fields.get(name)}" for name in names] for fields in (first, second))
    is_own, is_other = (", ".join(side) for side in sides)
    return is_own, is_other


def _text_of(spec: QuantizationSpec | None) -> str:
    return "float" if spec is None else describe(spec)


def _fields(spec: QuantizationSpec) -> dict[str, Any]:
    """Return the fields of all stages of a specification that a reader of parameters needs."""
    data = spec.to_dict()
    stages = data if isinstance(data, list) else [data]
    return {
        f"{name} of stage 2" if number else name: value
        for number, stage in enumerate(stages)
        for name, value in stage.items()
        if name not in _UNREAD
    }
