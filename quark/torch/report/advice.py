"""Summary of a report in sentences, and remedies for the worst layers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from quark.torch.evaluation.predictions import Predictions
from quark.torch.quantization.config.algo import ALGO_CONFIGS, RoundingConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.type import QSchemeType
from quark.torch.report.layer import Layer
from quark.torch.report.storage import FloatPart

WORST = 5
MAX_REMEDIES = 3  # for a layer
WIDE = 20.0  # ratio of the range of a channel of inputs to the median, from which it is an outlier
CLIPPED = 1e-3  # share of inputs beyond the largest quantized one, from which it matters
SMALL_GROUP = 32
NARROW = 4.6  # bits of a weight up to which rounding to the nearest is coarse
# Increase of perplexity -> what to call it.
_GRADES = ((0.01, "hardly measurable"), (0.03, "a small loss"), (0.1, "a noticeable loss"))
_PER_ROW = {
    ("wo", False): "int8_wo",
    ("wo", True): "fp8_wo",
    ("ptpc", False): "ptpc_int8",
    ("ptpc", True): "ptpc_fp8",
}
# Layers are ranked by the first of these that is known.
_MEASURES: dict[str, Callable[[Layer], float | None]] = {
    "output error": lambda layer: layer.output_error,
    "weight error": lambda layer: None if layer.error is None else layer.error.relative,
    "outliers": lambda layer: layer.values.peak,
}


@dataclass(frozen=True)
class Worst:
    """One of the layers with the largest errors.

    Attributes:
        name: Full name of the layer.
        measure: Figure that it is ranked by: ``output error``, ``weight error`` or ``outliers``.
        value: The figure: a share of the norm, or for outliers a ratio to the root mean square.
        tries: Remedies, the most promising first.
    """

    name: str
    measure: str
    value: float
    tries: list[str]


def verdict(
    size: int,
    original: int | None,
    predictions: Predictions | None,
    layers: Sequence[Layer],
    floats: Sequence[FloatPart],
) -> list[str]:
    """Return a few sentences on the size and accuracy of a quantized model.

    Args:
        size: Bytes of the checkpoint.
        original: Bytes of the original, None if it is not known.
        predictions: What the models predict, None without data.
        layers: The quantized layers.
        floats: Modules that are not quantized.
    """
    weights, bits = sum(x.weights for x in layers), 8 * sum(x.bytes for x in layers)
    count = weights + sum(x.parameters for x in floats)
    said = [
        f"{len(layers)} layers with {weights / count:.0%} of the parameters are quantized, to "
        f"{bits / weights:.2f} bits per weight."
    ]
    if original is not None:
        said.insert(0, f"The model is {original / size:.1f} times smaller than the original.")
    if predictions is None:
        said.append("The effect on predictions was not measured: give --dataset.")
    elif predictions.original is None or predictions.agreement is None:
        said.append("The original was not measured: give --original to compare with it.")
    else:
        said.append(
            f"Perplexity changes by {_describe_change(predictions)}. The top-1 predictions agree "
            f"on {predictions.agreement:.1%} of tokens."
        )
    moved = sum(x.error is not None and x.error.change == "other" for x in layers)
    if moved:
        said.append(
            f"{moved} layers cannot be compared with the original one by one: their weights were "
            "rotated, or come from another model."
        )
    return said


def _describe_change(predictions: Predictions) -> str:
    """Return the change of the perplexity in words, with all grades within two standard errors."""
    change, error = predictions.change, predictions.change_error
    assert change is not None
    if error is None:
        return f"{change:+.1%}: {_grade(change)}, in one window of text"
    least, most = _grade(change - 2 * error), _grade(change + 2 * error)
    words = least if least == most else f"{least} or {most}, which a larger --limit can tell apart"
    return f"{change:+.1%} ± {error:.1%}: {words}"


def _grade(change: float) -> str:
    return next((words for most, words in _GRADES if change < most), "a severe loss")


def worst_layers(
    layers: Sequence[Layer],
    configs: Mapping[str, QuantizationConfig],
    algorithms: Collection[str],
) -> list[Worst]:
    """Return the layers with the largest errors, the worst first, with remedies.

    Layers are ranked by output error; if that is unknown, by weight error, then by outliers.

    Args:
        layers: The quantized layers.
        configs: Configuration of each layer.
        algorithms: Names of the algorithms that were used.
    """
    return [
        Worst(x.name, measure, value, list(_tries(x, configs[x.name], algorithms))[:MAX_REMEDIES])
        for measure, value, x in ranked(layers)[:WORST]
    ]


def ranked(layers: Sequence[Layer]) -> list[tuple[str, float, Layer]]:
    """Return the layers that can be ranked, the worst first: measure, value, layer."""
    rows: list[tuple[str, float, Layer]] = []
    for measure, figure in _MEASURES.items():
        rows = [(measure, value, x) for x in layers if (value := figure(x)) is not None]
        if rows:
            break
    return sorted(rows, key=lambda row: -row[1])


def _tries(layer: Layer, config: QuantizationConfig, algorithms: Collection[str]) -> Iterator[str]:
    """Iterate over the remedies for a layer."""
    inputs = layer.inputs
    lost = layer.error.relative if layer.error and layer.error.relative else 0.0
    if inputs is not None and inputs.error is not None and inputs.error > lost:
        yield from _for_inputs(layer, config, algorithms)
    yield from _for_weights(layer, config, algorithms)
    yield (
        f"keep it in float ({layer.weights * 2 / 1e6:.1f} MB in 16 bits): add "
        f"{shlex.quote(layer.name)} to --exclude_layers"
    )


def _for_inputs(
    layer: Layer, config: QuantizationConfig, algorithms: Collection[str]
) -> Iterator[str]:
    inputs, spec = layer.inputs, config.input_tensors
    assert inputs is not None and spec is not None
    ratio = inputs.channels[0].ratio if inputs.channels else None
    if ratio is not None and ratio > WIDE and all(map(_rounds, algorithms)):
        channel = inputs.channels[0].index
        yield (
            f"channel {channel} of its inputs has {ratio:.0f} times the median range: use "
            "--quant_algo smoothquant or --pre_quantization_optimization rotation"
        )
    if not spec.is_dynamic and inputs.clipped is not None and inputs.clipped > CLIPPED:
        yield f"{inputs.clipped:.1%} of its inputs are clipped: calibrate with other text"
    if not spec.is_dynamic and spec.qscheme is QSchemeType.per_tensor:
        name = "ptpc_int8" if not spec.scheme.fmt.is_float else "ptpc_fp8"
        yield f"all its inputs share one scale: use one for each token, {_scheme(layer.name, name)}"


def _for_weights(
    layer: Layer, config: QuantizationConfig, algorithms: Collection[str]
) -> Iterator[str]:
    spec = config.weight
    if spec is None or not spec.fmt.scaled:
        return
    is_grouped = spec.qscheme in (QSchemeType.per_group, QSchemeType.per_block)
    is_narrow = layer.bits_per_weight < NARROW
    if is_narrow and not any(map(_rounds, algorithms)):
        yield "round with calibration data, not to the nearest code: --quant_algo qronos or gptq"
    if spec.qscheme is QSchemeType.per_tensor:
        kind = "wo" if config.input_tensors is None else "ptpc"
        name = _PER_ROW[kind, spec.scheme.fmt.is_float]
        yield f"all its weights share one scale: use one for each row, {_scheme(layer.name, name)}"
    elif is_narrow and not (is_grouped and 0 < spec.scheme.group <= SMALL_GROUP):
        yield f"use smaller groups: {_scheme(layer.name, 'int4_wo_32')}"
    if layer.bits_per_weight < 2 * NARROW - 2:
        yield f"use more bits: {_scheme(layer.name, 'int8_wo')}"


def _rounds(algorithm: str) -> bool:
    """Whether an algorithm solves for rounded weights; the others change weights and inputs."""
    return issubclass(ALGO_CONFIGS[algorithm], RoundingConfig)


def _scheme(name: str, scheme: str) -> str:
    return f"--layer_quant_scheme {shlex.quote(name)} {scheme}"
