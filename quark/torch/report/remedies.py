"""Changes that can lower the loss of a quantized model, the best first, each once.

The order is that of ``_REMEDIES``: first what keeps the size, then what needs more bits. A remedy
names the layers with the largest errors to which it applies::

    layer      weight error   input error
    q_proj     9 %            1 %            -> recipe, search, smaller groups, more bits, float
    down_proj  2 %            30 %           -> smoothing, one scale per token, float
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quark.torch.quantization.config.algo import ALGO_CONFIGS, RoundingConfig
from quark.torch.quantization.config.description import describe_layer
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.recipes import RECIPES
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.report.advice import WORST, ranked
from quark.torch.report.layer import Layer

WIDE = 20.0  # ratio of the range of a channel of inputs to the median, from which it is an outlier
CLIPPED = 1e-3  # share of inputs beyond the largest quantized one, from which it matters
SMALL_GROUP = 32
NARROW = 4.6  # bits of a weight up to which rounding to the nearest is coarse
_PER_ROW = {
    ("wo", False): "int8_wo",
    ("wo", True): "fp8_wo",
    ("ptpc", False): "ptpc_int8",
    ("ptpc", True): "ptpc_fp8",
}


@dataclass(frozen=True)
class Remedy:
    """A change that can lower the loss.

    Attributes:
        text: What to do, and for which reason.
        flags: Options of ``quark quantize``, or another command.
        layers: Names of the layers with large errors that it is for.
    """

    text: str
    flags: str
    layers: list[str]


class _Case(NamedTuple):
    """A layer with a large error.

    Attributes:
        layer: Its figures.
        config: Its configuration.
        algorithms: Names of the algorithms that the checkpoint was made with.
        excluded: Patterns of the layers that stay in float.
        names_algorithms: Whether the checkpoint says with which algorithms it was made.
    """

    layer: Layer
    config: QuantizationConfig
    algorithms: Collection[str]
    excluded: Sequence[str]
    names_algorithms: bool

    @property
    def is_narrow(self) -> bool:
        """Whether its weight has few bits."""
        return self.layer.bits_per_weight < NARROW

    @property
    def loses_by_inputs(self) -> bool:
        """Whether its inputs have a larger error than its weight."""
        inputs, error = self.layer.inputs, self.layer.error
        lost = error.relative if error and error.relative else 0.0
        return inputs is not None and inputs.error is not None and inputs.error > lost

    @property
    def widest(self) -> float:
        """Range of the widest channel of its inputs in units of the median one; 0 if unknown."""
        channels = self.layer.inputs.channels if self.layer.inputs else []
        return channels[0].ratio or 0.0 if channels else 0.0


def remedies(
    layers: Sequence[Layer],
    configs: Mapping[str, QuantizationConfig],
    algorithms: Collection[str],
    excluded: Sequence[str] = (),
    names_algorithms: bool = True,
) -> list[Remedy]:
    """Return the changes that can lower the loss, the best first.

    Args:
        layers: The quantized layers.
        configs: Configuration of each layer.
        algorithms: Names of the algorithms that were used.
        excluded: Patterns of the layers that stay in float.
        names_algorithms: Whether the checkpoint says with which algorithms it was made. Formats of
            other tools do not.
    """
    facts = (algorithms, excluded, names_algorithms)
    worst = [_Case(x, configs[x.name], *facts) for _, _, x in ranked(layers)[:WORST]]
    advice = []
    for applies, describe in _REMEDIES:
        cases = [case for case in worst if applies(case)]
        if cases:
            text, flags = describe(cases)
            advice.append(Remedy(text, flags, [case.layer.name for case in cases]))
    return advice


def _lacks_recipe(case: _Case) -> bool:
    """Whether there are recipes for such a layer, and the algorithms of none were used."""
    names, used = _recipes_for(case.config), set(case.algorithms)
    return bool(names) and not any(_algorithms(name) <= used for name in names)


def _recipes_for(config: QuantizationConfig) -> list[str]:
    """Return the recipes whose schemes are close to the configuration of a layer, the best first.

    The schemes have the same elements of weights and inputs: ``w4`` for ``uint4_wo_64``. Those with
    the same scheme come first.
    """
    schemes = {name: scheme(row[0]) for name, row in RECIPES.items()}
    near = [name for name, other in schemes.items() if _elements(other) == _elements(config)]
    words = describe_layer(config)
    return sorted(near, key=lambda name: describe_layer(schemes[name]) != words)


def _elements(config: QuantizationConfig) -> tuple[str, ...]:
    """Return the formats of weights and inputs, signed and unsigned integers alike."""
    specs = (config.weight, config.input_tensors)
    return tuple("" if spec is None else spec.fmt.name.removeprefix("u") for spec in specs)


def _algorithms(recipe: str) -> set[str]:
    return {str(options["name"]) for options in RECIPES[recipe][1]}


def _use_recipe(cases: Sequence[_Case]) -> tuple[str, str]:
    name = _recipes_for(cases[0].config)[0]
    formats, options = RECIPES[name]
    words = ", ".join(str(one["name"]) for one in options)
    text = f"Round with calibration data by the recipe {name}: {formats} with {words}."
    return text + _unless_used(cases), f"--recipe {name}"


def _unless_used(cases: Sequence[_Case]) -> str:
    """Return a condition for checkpoints that do not say how they were made; "" for others."""
    if cases[0].names_algorithms:
        return ""
    return " The file does not say whether this was done: if it was, leave it out."


def _lacks_rounding(case: _Case) -> bool:
    return (
        case.is_narrow and not _recipes_for(case.config) and not any(map(_rounds, case.algorithms))
    )


def _use_rounding(cases: Sequence[_Case]) -> tuple[str, str]:
    text = "Round with calibration data, not to the nearest code."
    return text + _unless_used(cases), "--quant_algo qronos"


def _has_wide_channels(case: _Case) -> bool:
    is_untouched = all(map(_rounds, case.algorithms))
    return case.loses_by_inputs and case.widest > WIDE and is_untouched


def _smooth(cases: Sequence[_Case]) -> tuple[str, str]:
    ratio = max(case.widest for case in cases)
    return (
        f"The widest channel of inputs has {ratio:.0f} times the median range: smooth the inputs, "
        "or rotate them with --pre_quantization_optimization rotation.",
        "--quant_algo smoothquant",
    )


def _clips_inputs(case: _Case) -> bool:
    inputs, spec = case.layer.inputs, case.config.input_tensors
    if not case.loses_by_inputs or inputs is None or spec is None or spec.is_dynamic:
        return False
    return inputs.clipped is not None and inputs.clipped > CLIPPED


def _calibrate_anew(cases: Sequence[_Case]) -> tuple[str, str]:
    share = max(case.layer.inputs.clipped or 0.0 for case in cases if case.layer.inputs)
    return f"Up to {share:.1%} of inputs are clipped: calibrate with other text.", "--dataset FILE"


def _shares_input_scale(case: _Case) -> bool:
    spec = case.config.input_tensors
    if spec is None or spec.is_dynamic or not case.loses_by_inputs:
        return False
    return spec.qscheme is QSchemeType.per_tensor


def _scale_tokens(cases: Sequence[_Case]) -> tuple[str, str]:
    text = "All inputs of a layer share one scale: use one for each token."
    return text, _schemes(cases, _eight_bits(cases[0].config))


def _shares_weight_scale(case: _Case) -> bool:
    spec = case.config.weight
    return spec is not None and spec.fmt.scaled and spec.qscheme is QSchemeType.per_tensor


def _scale_rows(cases: Sequence[_Case]) -> tuple[str, str]:
    text = "All weights of a layer share one scale: use one for each row."
    return text, _schemes(cases, _eight_bits(cases[0].config))


def _eight_bits(config: QuantizationConfig) -> str:
    """Return the scheme of 8 bits with a scale for each row, and inputs like those of a layer."""
    spec = config.weight
    assert spec is not None
    return _PER_ROW["wo" if config.input_tensors is None else "ptpc", spec.fmt.is_float]


def _can_be_mixed(case: _Case) -> bool:
    spec = case.config.weight
    is_weight_only = spec is not None and case.config.input_tensors is None
    return is_weight_only and 2 < case.layer.bits_per_weight < 2 * NARROW - 2


def _search(cases: Sequence[_Case]) -> tuple[str, str]:
    bits = cases[0].layer.bits_per_weight
    return (
        "Choose the format of each layer, with the least loss at the same size.",
        f"quark search --model_dir MODEL --target_bits {bits:.2f} --output mixed.json",
    )


def _has_large_groups(case: _Case) -> bool:
    spec = case.config.weight
    if spec is None or case.config.input_tensors is not None or not case.is_narrow:
        return False
    is_grouped = spec.qscheme in (QSchemeType.per_group, QSchemeType.per_block)
    is_small = is_grouped and 0 < spec.scheme.group <= SMALL_GROUP
    return not is_small and _small_groups(case.config) in scheme_names()


def _small_groups(config: QuantizationConfig) -> str:
    assert config.weight is not None
    return f"{config.weight.fmt.name}_wo_{SMALL_GROUP}"


def _use_smaller_groups(cases: Sequence[_Case]) -> tuple[str, str]:
    name = _small_groups(cases[0].config)
    return "Use smaller groups in the worst layers.", _schemes(cases, name)


def _has_few_bits(case: _Case) -> bool:
    spec = case.config.weight
    return spec is not None and spec.fmt.scaled and case.layer.bits_per_weight < 2 * NARROW - 2


def _use_more_bits(cases: Sequence[_Case]) -> tuple[str, str]:
    layers = [case.layer for case in cases]
    cost = sum(x.weights * (8 - x.bits_per_weight) / 8 for x in layers)
    return f"Use 8 bits in the worst layers ({cost / 1e6:+.1f} MB).", _schemes(
        cases, _eight_bits(cases[0].config)
    )


def _keep_float(cases: Sequence[_Case]) -> tuple[str, str]:
    layers = [case.layer for case in cases]
    cost = sum(2 * x.weights - x.bytes for x in layers)
    names = " ".join(map(shlex.quote, [*cases[0].excluded, *(x.name for x in layers)]))
    text = f"Keep the worst layers in float ({cost / 1e6:+.1f} MB in 16 bits)."
    return text, f"--exclude_layers {names}"


def _rounds(algorithm: str) -> bool:
    """Whether an algorithm solves for rounded weights; the others change weights and inputs."""
    return issubclass(ALGO_CONFIGS[algorithm], RoundingConfig)


def _schemes(cases: Sequence[_Case], wanted: str) -> str:
    names = (shlex.quote(case.layer.name) for case in cases)
    return " ".join(f"--layer_quant_scheme {name} {wanted}" for name in names)


_REMEDIES: tuple[
    tuple[Callable[[_Case], bool], Callable[[Sequence[_Case]], tuple[str, str]]], ...
] = (
    (_lacks_recipe, _use_recipe),
    (_lacks_rounding, _use_rounding),
    (_has_wide_channels, _smooth),
    (_clips_inputs, _calibrate_anew),
    (_shares_input_scale, _scale_tokens),
    (_shares_weight_scale, _scale_rows),
    (_can_be_mixed, _search),
    (_has_large_groups, _use_smaller_groups),
    (_has_few_bits, _use_more_bits),
    (lambda case: True, _keep_float),
)
