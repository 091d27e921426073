"""Specifications and configurations that tests of several rooms use."""

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec

_WHERE = {
    "per_channel": {"ch_axis": 0},
    "per_group": {"ch_axis": -1, "group_size": 32},
    "per_block": {"block_size": (8, 8)},
}


def spec(dtype, qscheme="per_tensor", symmetric=None, **rest):
    """Return a static specification: rows are the channels, groups lie along the inputs."""
    where = {"is_dynamic": False, "symmetric": symmetric, **_WHERE.get(qscheme, {})}
    return QuantizationSpec(dtype, qscheme=qscheme, **{**where, **rest})


def groups(dtype, symmetric=True, size=32, **rest):
    """Return a static specification of groups of inputs, or of rows where ``size`` is None."""
    where = {"qscheme": "per_channel"} if size is None else {"qscheme": "per_group"}
    where |= {} if size is None else {"group_size": size}
    return spec(dtype, **{"symmetric": symmetric, **where, **rest})


def half_groups(dtype, symmetric=True):
    """Return a specification of groups of 32 with scales in float16, which GGUF stores too."""
    return groups(dtype, symmetric, scale_type="float16")


def config(weight, inputs=None, exclude=("lm_head",), **rest):
    """Return a configuration: specifications for the weights and inputs of every layer."""
    layer = QuantizationConfig(weight=weight, input_tensors=inputs)
    return Config(layer, exclude=list(exclude), **rest)


def preset(name, *algorithms, exclude=("lm_head",), **rest):
    """Return the configuration of a scheme, by name or as it is, in groups of 32."""
    layers = scheme(name, 32) if isinstance(name, str) else name
    return Config(layers, exclude=list(exclude), algo_config=list(algorithms) or None, **rest)


def quantized(model, config, data=None, frozen=True):
    """Quantize a model, and freeze it unless ``frozen`` is False."""
    model = ModelQuantizer(config).quantize_model(model, None if data is None else list(data))
    return ModelQuantizer.freeze(model) if frozen else model


def quantized_by(model, name, *algorithms, data=None, frozen=True, **rest):
    """Quantize all but the output head of a model by a scheme and algorithms; see ``preset``."""
    rest = {"exclude": ["lm_head", "embed_out"], **rest}
    return quantized(model, preset(name, *algorithms, **rest), data, frozen)
