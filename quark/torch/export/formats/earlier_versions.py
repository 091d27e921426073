"""Checks of checkpoints of versions before 1.0, and of AMD Quark up to 0.13.

Some schemes lost values when they were written, others mean something else there. A model that is
read from such a checkpoint would differ from the one that was quantized, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from quark.torch.quantization.config.attention import check_softmax
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.config.type import Dtype

_TOKENS = (1, -2)  # axis of the tokens in inputs of (batch, tokens, features)
_AGAIN = "Quantize the float model again."


def is_earlier(config: Config) -> bool:
    """Whether a version before 1.0 wrote a configuration."""
    return str(config.version or "0").startswith("0")


def check_readable(config: Config, options: JsonExporterConfig) -> None:
    """Check that a checkpoint holds what its configuration describes.

    Raises:
        ValueError: It does not; the message names the tensor and the reason.
    """
    check_softmax(config)
    if not is_earlier(config):
        return
    layers = [config.global_quant_config, *config.layer_type_quant_config.values()]
    for layer in [*layers, *config.layer_quant_config.values()]:
        _check_layer(layer, options, str(config.version))


def _check_layer(layer: QuantizationConfig, options: JsonExporterConfig, version: str) -> None:
    of_parameters = _VALUES if options.weight_format == "fake_quantized" else _PACKED
    for name, spec in layer.specs():
        for is_lost, reason in of_parameters if name in PARAMETERS else _INPUTS:
            if is_lost(spec):
                raise ValueError(f"{name} in a checkpoint of version {version}: {reason} {_AGAIN}")


_Rule = tuple[Callable[[QuantizationSpec], bool], str]
_VALUES: tuple[_Rule, ...] = (
    (
        lambda s: bool(s.is_dynamic) and not s.fixes_blocks and s.fmt.scaled,
        "with is_dynamic=True it was stored before it was quantized, without scales. Weights are "
        "static: set is_dynamic=False.",
    ),
)
_PACKED: tuple[_Rule, ...] = (
    *_VALUES,
    (
        lambda s: (
            s.second_stage is not None
            and s.second_stage.is_scale_quant
            and s.second_stage.dtype is Dtype.fp8_e5m3
        ),
        "scales in two levels with fp8_e5m3 were stored modulo 256, so they are lost.",
    ),
    (
        lambda s: s.scheme.float_zero_point,
        "zero points of zero_point_type=float32 were stored as integers, so their fractions are "
        "lost.",
    ),
)
_INPUTS: tuple[_Rule, ...] = (
    (lambda s: s.four_over_six, "scales of inputs were not chosen between 4 and 6."),
    (
        lambda s: (
            (bool(s.is_dynamic) and s.scheme.has_zero_point and s.scheme.symmetric)
            and not s.fmt.signed
        ),
        "symmetric unsigned integers had the zero point 0, so all negative values became 0. Here "
        "their zero point is in the middle.",
    ),
    (
        lambda s: s.scheme.per_token and s.ch_axis not in _TOKENS,
        "only ch_axis=1 is a scale for each token there. Here it is so for any ch_axis.",
    ),
)
