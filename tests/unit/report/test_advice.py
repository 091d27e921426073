"""What is said of a layer follows from how it is quantized and from what was measured."""

from dataclasses import replace

import pytest
import torch

from quark.torch.evaluation.predictions import Predictions
from quark.torch.quantization.config.description import LayerDescription
from quark.torch.quantization.config.presets import scheme
from quark.torch.report.activations import Channel, Inputs
from quark.torch.report.advice import few_windows, is_harmless, ranked, verdict
from quark.torch.report.layer import Layer
from quark.torch.report.remedies import remedies
from quark.torch.report.storage import FloatPart, kind_of, kinds
from quark.torch.report.weights import Values, WeightError, histogram

BITS = {
    "int4_wo_32": 5.125, "int4_wo_128": 4.25, "uint4_wo_128": 4.25, "int8": 8.0, "fp8": 8.0,
    "ptpc_int8": 8.1, "mxfp4": 4.25, "nvfp4": 4.5, "int6_wo_32": 6.5, "amdfp4": 4.5,
}  # fmt: skip


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
    row = layer(bits=BITS[name], **facts)
    return remedies([row], {row.name: scheme(name)}, algorithms, ["lm_head"])


@pytest.mark.parametrize(
    ("name", "facts", "said", "not_said"),
    [
        ("int4_wo_128", {}, ["--recipe w4", "search", "int4_wo_32", "int8_wo"], ["ptpc"]),
        ("int4_wo_128", {"algorithms": ["gptq"]}, ["--recipe w4", "exclude"], ["qronos"]),
        ("int4_wo_128", {"algorithms": ["awq", "yaqa"]}, ["int4_wo_32", "search"], ["recipe"]),
        ("uint4_wo_128", {}, ["--recipe w4", "uint4_wo_32"], [" int4_wo_32"]),
        ("int4_wo_32", {}, ["search", "int8_wo", "exclude"], ["int4_wo_32"]),
        ("mxfp4", {}, ["--recipe mxfp4", "ptpc_fp8"], ["nvfp4", "search", "int8"]),
        ("mxfp4", {"algorithms": ["smooth", "rotation", "yaqa"]}, ["ptpc_fp8"], ["recipe"]),
        ("nvfp4", {}, ["--recipe nvfp4"], ["mxfp4"]),
        ("int6_wo_32", {}, ["search", "exclude"], ["recipe", "qronos"]),
        ("amdfp4", {}, ["--recipe mxfp4"], ["qronos"]),
        ("int8", {}, ["one for each row", "ptpc_int8", "exclude"], ["each token", "qronos"]),
        ("fp8", {"inputs": inputs()}, ["each token", "ptpc_fp8"], ["clipped", "smoothquant"]),
        ("int8", {"inputs": inputs(clipped=0.02)}, ["2.0% of inputs are clipped"], []),
        ("int8", {"inputs": inputs(ratio=50)}, ["widest channel", "50 times", "smoothquant"], []),
        (
            "int8",
            {"inputs": inputs(ratio=50), "algorithms": ["smooth"]},
            ["each token"],
            ["smoothquant"],
        ),
        ("int8", {"inputs": inputs(error=0.01, ratio=50)}, ["each row"], ["smoothquant", "token"]),
        ("ptpc_int8", {"inputs": inputs()}, ["--recipe w8a8_dynamic", "exclude"], ["clipped"]),
        (
            "ptpc_int8",
            {"inputs": inputs(), "algorithms": ["smooth", "gptq"]},
            ["exclude"],
            ["ptpc", "clipped"],
        ),
    ],
)
def test_what_to_try(name, facts, said, not_said):
    words = " | ".join(f"{remedy.text} {remedy.flags}" for remedy in advice(name, **facts))
    assert [word for word in said if word not in words] == []
    assert [word for word in not_said if word in words] == []


def test_advice_is_given_once_and_the_best_first():
    names = [f"a.{i}.q_proj" for i in range(7)]
    layers = [layer(name, relative=0.1 + i / 100) for i, name in enumerate(names)]
    layers = [replace(row, bytes=4250) for row in layers]
    configs = dict.fromkeys(names, scheme("int4_wo_128"))
    found = remedies(layers, configs, (), ["lm_head"])
    worst = names[:1:-1]
    assert [row.flags.split(" ")[0] for row in found] == [
        "--recipe",
        "quark",
        "--layer_quant_scheme",
        "--layer_quant_scheme",
        "--exclude_layers",
    ]
    assert found[0].flags == "--recipe w4"
    assert found[1].flags == "quark search --model_dir MODEL --target_bits 4.25 --output mixed.json"
    assert found[2].flags.split("--layer_quant_scheme ")[1:] == [
        f"{name} int4_wo_32{' ' if name != worst[-1] else ''}" for name in worst
    ]
    assert found[4].flags == f"--exclude_layers lm_head {' '.join(worst)}"
    assert all(row.layers == worst for row in found)
    assert "+0.1 MB" in found[4].text


@pytest.mark.parametrize("name", ["int4_wo_128", "int5_wo_128"])
def test_files_of_other_tools_do_not_say_what_was_done(name):
    row = layer(bits=4.25)
    advice = [
        remedies([row], {row.name: scheme(name)}, (), [], names_algorithms=named)[0].text
        for named in (True, False)
    ]
    assert all(text.startswith("Round with calibration data") for text in advice)
    assert advice[1].removeprefix(advice[0]).startswith(" The file does not say whether")


def test_a_known_small_loss_needs_no_advice():
    def change(perplexity, error):
        return Predictions(perplexity, 0.1, 10.0, error, 0.1, 0.01, 0.9, 0.01, 10)

    assert is_harmless(change(10.05, 0.001))
    assert not is_harmless(change(10.05, 0.004))
    assert not is_harmless(change(10.05, None))
    assert not is_harmless(Predictions(10.0, 0.1))
    assert not is_harmless(None)


def test_names_are_quoted_for_the_shell():
    row = layer("a; rm b")
    flags = [remedy.flags for remedy in remedies([row], {row.name: scheme("int8")}, ())]
    assert flags
    assert all("'a; rm b'" in text for text in flags if "a;" in text)
    assert "'a; rm b'" in flags[-1]


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
        (12, None, "+20.0% in one window of text; more windows"),
    ],
)
def test_the_verdict(perplexity, error, grade):
    floats = [FloatPart("norm", "norm", 8000, 16000, "")]
    predictions = Predictions(perplexity, 0.1, 10.0, error, 0.1, 0.01, 0.9, 0.02, 10)
    said = verdict(10_000, 40_000, predictions, [layer(bits=4.25)], floats)
    assert said[0] == "The model is 4.0 times smaller than the original."
    assert said[1].startswith("1 layers with 50% of the parameters are quantized, to 4.25 bits")
    assert grade in said[2]
    assert "90.0% ± 2.0%" in said[2]
    (larger, *_) = verdict(40_000, 10_000, predictions, [layer(bits=4.25)], floats)
    assert larger == "The model is 4.0 times as large as the original."


@pytest.mark.parametrize("windows", [2, 4, 7])
def test_few_windows(windows):
    """The uncertainty of a standard error, against that of draws."""
    draws = torch.randn(20_000, windows, generator=torch.Generator().manual_seed(0)).std(dim=1)
    share = int(few_windows(windows).split("about ")[1].split("%")[0]) / 100
    # The formula is that of many values: of two it is a little less than the ratio of draws.
    assert share == pytest.approx(float(draws.std() / draws.mean()), rel=0.1)


def test_enough_windows_and_one():
    assert few_windows(8) == ""
    assert few_windows(1).startswith("One window of text gives no standard errors.")


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
