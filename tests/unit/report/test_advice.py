"""What is said of a layer follows from how it is quantized and from what was measured."""

import pytest
import torch

from quark.torch.evaluation.predictions import Predictions
from quark.torch.quantization.config.description import LayerDescription
from quark.torch.quantization.config.presets import scheme
from quark.torch.report.activations import Channel, Inputs
from quark.torch.report.advice import ranked, verdict, worst_layers
from quark.torch.report.layer import Layer
from quark.torch.report.storage import FloatPart, kind_of, kinds
from quark.torch.report.weights import Values, WeightError, histogram

BITS = {"int4_wo_32": 5.125, "int4_wo_128": 4.25, "int8": 8.0, "fp8": 8.0, "ptpc_int8": 8.1}


def layer(
    name="a.q_proj", relative=0.1, output_error=None, inputs=None, bits=8.0, change="rounded"
):
    return Layer(
        name=name,
        kind="q_proj",
        scheme=LayerDescription(),
        shape=(100, 80),
        weights=8000,
        bytes=int(1000 * bits),
        values=Values(0.1, 0.5),
        original=None,
        scales=None,
        error=None if change is None else WeightError(change, relative),
        inputs=inputs,
        output_error=output_error,
        histogram=None,
    )


def inputs(error=0.3, clipped=0.0, ratio=2.0):
    counts = histogram(None, torch.zeros(1))
    return Inputs(9, Values(1.0, 2.0), [Channel(7, 2.0, ratio)], counts, error, clipped)


def advice(name, algorithms=(), **facts):
    found = layer(bits=BITS[name], **facts)
    (worst,) = worst_layers([found], {found.name: scheme(name)}, algorithms)
    return " | ".join(worst.tries)


@pytest.mark.parametrize(
    ("name", "facts", "said", "not_said"),
    [
        ("int4_wo_128", {}, ["qronos", "int4_wo_32", "int8_wo"], ["ptpc"]),
        ("int4_wo_128", {"algorithms": ["gptq"]}, ["int4_wo_32", "exclude"], ["qronos"]),
        ("int4_wo_32", {}, ["int8_wo", "exclude"], ["int4_wo_32"]),
        ("int8", {}, ["one for each row", "ptpc_int8", "exclude"], ["each token", "qronos"]),
        ("fp8", {"inputs": inputs()}, ["each token", "ptpc_fp8"], ["clipped", "smoothquant"]),
        ("int8", {"inputs": inputs(clipped=0.02)}, ["2.0% of its inputs are clipped"], []),
        ("int8", {"inputs": inputs(ratio=50)}, ["channel 7", "50 times", "smoothquant"], []),
        (
            "int8",
            {"inputs": inputs(ratio=50), "algorithms": ["smooth"]},
            ["each token"],
            ["smoothquant"],
        ),
        ("int8", {"inputs": inputs(error=0.01, ratio=50)}, ["each row"], ["smoothquant", "token"]),
        ("ptpc_int8", {"inputs": inputs()}, ["exclude"], ["ptpc", "clipped"]),
    ],
)
def test_what_to_try(name, facts, said, not_said):
    words = advice(name, **facts)
    assert [word for word in said if word not in words] == []
    assert [word for word in not_said if word in words] == []


def test_names_are_quoted_for_the_shell():
    found = layer("a; rm b")
    (worst,) = worst_layers([found], {found.name: scheme("int8")}, ())
    assert "'a; rm b'" in worst.tries[0]


def test_the_best_measure_there_is_ranks():
    known = [layer("a", 0.1, 0.5), layer("b", 0.9, None), layer("c", 0.2, 0.6)]
    assert [(m, x.name) for m, _, x in ranked(known)] == [("output error", n) for n in "ca"]
    assert [x.name for _, _, x in ranked([layer("a", 0.1), layer("b", 0.2)])] == ["b", "a"]
    (row,) = ranked([layer("a", None, change="other")])
    assert row[:2] == ("outliers", 5.0)


@pytest.mark.parametrize(
    ("perplexity", "error", "grade"),
    [
        (9.9, 0.001, "-1.0% ± 0.1%: hardly measurable."),
        (10.05, 0.001, "+0.5% ± 0.1%: hardly measurable."),
        (10.2, 0.001, "+2.0% ± 0.1%: a small loss."),
        (10.2, 0.01, "+2.0% ± 1.0%: hardly measurable or a noticeable loss, which a larger"),
        (10.5, 0.001, "a noticeable loss."),
        (12, 0.001, "a severe loss."),
        (12, None, "+20.0%: a severe loss, in one window of text."),
    ],
)
def test_the_verdict(perplexity, error, grade):
    floats = [FloatPart("norm", "norm", 8000, 16000, "")]
    predictions = Predictions(perplexity, 0.1, 10.0, error, 0.1, 0.01, 0.9, 10)
    said = verdict(10_000, 40_000, predictions, [layer(bits=4.25)], floats)
    assert said[0] == "The model is 4.0 times smaller than the original."
    assert said[1].startswith("1 layers with 50% of the parameters are quantized, to 4.25 bits")
    assert grade in said[2]
    assert "90.0%" in said[2]


def test_rotated_layers_are_mentioned():
    said = verdict(1, None, None, [layer(change="other"), layer()], [])
    assert said[-1].startswith("1 layers cannot be compared")


def test_kinds_sum_to_all_bytes():
    floats = [FloatPart("a.norm", "norm", 4, 8, ""), FloatPart("b.norm", "norm", 4, 8, "")]
    found = {kind.name: kind for kind in kinds([layer(), layer("b.q_proj")], floats, 20_000)}
    assert (found["q_proj"].layers, found["q_proj"].bytes) == (2, 16_000)
    assert (found["norm"].parameters, found["norm"].is_quantized) == (8, False)
    assert found["biases, scales of activations"].bytes == 20_000 - 16_016
    assert kind_of("model.layers.0.experts.3.up_proj") == "up_proj"
    assert kind_of("model.layers.3") == "layers"
