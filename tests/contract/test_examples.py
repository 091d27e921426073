"""The examples of training and of graph mode run, and what they write is what they measured."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from quark.torch import import_model_from_safetensors, load_params

EXAMPLES = Path(__file__).parents[2] / "examples/torch"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run an example in this process; returns what it defines, its figures and its output."""

    def run(name, *arguments):
        path = EXAMPLES / name
        output = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [str(path), "--output_dir", str(output), *arguments])
        names = runpy.run_path(str(path), run_name="__main__")
        lines = re.findall(r"^(.*): ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
        return names, {title: float(figure) for title, figure in lines}, output

    return run


def test_a_vision_model_as_a_graph(run, run_onnx):
    names, figures, output = run("vision/quantize_graph.py", "--steps", "60")
    assert list(figures) == ["float", "quantized", "trained"]
    assert figures["float"] > 0.9  # a third by chance
    assert min(figures["quantized"], figures["trained"]) > figures["float"] - 0.02
    loaded = load_params(pth_path=output / "net_quantized.pth", quant_mode="fx_graph_mode")
    assert names["accuracy"](loaded) == pytest.approx(figures["trained"], abs=5e-4)
    images, _ = names["make_pictures"](64, seed=2)
    (actual,) = run_onnx(output / "onnx", images)
    assert (actual.argmax(1) == loaded(images).argmax(1)).double().mean() > 0.95


def test_a_language_model_with_low_bit_weights(run):
    _, figures, output = run("language_modeling/llm_qat/train_quantized.py", "--steps", "6")
    before, after = figures["divergence before training"], figures["divergence after training"]
    assert 0 < after < before
    assert import_model_from_safetensors(None, output).config.model_type == "llama"
