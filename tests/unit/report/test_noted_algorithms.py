"""Checkpoints in formats of other tools name the algorithms that this package ran."""

import json

import pytest

from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig, YaqaConfig
from quark.torch.report.measurement import measure
from tests.configurations import preset, quantized

NOTE = "quantization_algorithms"


def note(path):
    return json.loads((path / "config.json").read_text(encoding="utf-8")).get(NOTE)


GPTQ = GPTQConfig()


@pytest.mark.parametrize(
    ("algorithms", "named"),
    [((), "none"), ((GPTQ,), "gptq"), ((AWQConfig(), YaqaConfig()), "awq, yaqa")],
)
def test_a_report_of_another_layout_knows_the_algorithms(
    algorithms, named, build, batches, export, tmp_path
):
    model = quantized(build(), preset("uint4_wo_32", *algorithms), batches)
    assert note(export(model)) is None  # the section of this format has them with their options
    path = export(model, custom_mode="awq")
    assert note(path) == named
    report = measure(path)
    assert report.algorithms == tuple(options.name for options in algorithms)
    assert not any("does not say whether" in remedy.text for remedy in report.advice)
    assert any("the recipe w4" in remedy.text for remedy in report.advice) == (named != "awq, yaqa")


def test_a_conversion_keeps_the_note(build, batches, export):
    model = quantized(build(), preset("uint4_wo_32", GPTQ), batches)
    first = load_checkpoint(export(model))
    second = load_checkpoint(export(first, custom_mode="awq"))
    assert note(export(second, custom_mode="gptq")) == "gptq"


def test_a_file_of_another_tool_has_no_note(build, batches, export):
    """Its algorithms are unknown, and stay so."""
    path = export(quantized(build(), preset("uint4_wo_32"), batches), custom_mode="awq")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    del config[NOTE]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert any("does not say whether" in remedy.text for remedy in measure(path).advice)
    assert note(export(load_checkpoint(path), custom_mode="gptq")) is None
