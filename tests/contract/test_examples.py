"""The examples run, and what they write is what they measured."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from quark.torch import import_model_from_safetensors, load_params
from quark.torch.export.recognition import load_checkpoint, read_contents

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = ("--samples", "2")
# Less calibration text for notebooks, and less text to measure.
SHORTER = {
    "limit=16": "limit=2",
    "limit=8": "limit=2",
    "limit=4": "limit=2",
    "length=256": "length=64",
}


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
    names, figures, output = run("torch/vision/quantize_graph.py", "--steps", "60")
    assert list(figures) == ["float", "quantized", "trained"]
    assert figures["float"] > 0.9  # a third by chance
    assert min(figures["quantized"], figures["trained"]) > figures["float"] - 0.02
    loaded = load_params(pth_path=output / "net_quantized.pth", quant_mode="fx_graph_mode")
    assert names["accuracy"](loaded) == pytest.approx(figures["trained"], abs=5e-4)
    images, _ = names["make_pictures"](64, seed=2)
    (actual,) = run_onnx(output / "onnx", images)
    assert (actual.argmax(1) == loaded(images).argmax(1)).double().mean() > 0.95


def test_a_language_model_with_low_bit_weights(run):
    _, figures, output = run("torch/language_modeling/llm_qat/train_quantized.py", "--steps", "6")
    before, after = figures["divergence before training"], figures["divergence after training"]
    assert 0 < after < before
    assert import_model_from_safetensors(None, output).config.model_type == "llama"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("fp8_cache.py", "quark"),
        ("awq.py", "awq"),
        ("gptq.py", "gptq"),
        ("rotated_mxfp4.py", "quark"),
    ],
)
def test_a_language_model(run, one_block, name, method):
    _, figures, output = run(name, "--model_dir", str(one_block), *FEW)
    before, after = figures["perplexity before"], figures["perplexity after"]
    assert before != after
    assert after == pytest.approx(
        before, rel=0.2
    )  # MXFP4 inputs change a model of one block by 15 %
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == method
    assert len(read_contents(output).summary.layers) == 7
    ids = torch.arange(24)[None] + 5
    assert load_checkpoint(output)(ids).logits.isfinite().all()


def test_a_model_of_its_own(run):
    """Without a model, the shipped one, of four blocks, is quantized."""
    _, _, output = run("fp8_cache.py", "--samples", "1")
    assert len(read_contents(output).summary.layers) == 28


def test_a_mixture_of_experts(run):
    _, _, output = run("experts.py", "--samples", "8")
    layers = {layer.name: layer for layer in read_contents(output).summary.layers}
    assert len(layers) == 2 * (4 + 8 * 3)  # attention; experts with gate, up, down
    kinds = {name.split(".")[3]: layer.scheme for name, layer in layers.items()}
    assert "int4 per group 32" in kinds["mlp"].weight
    assert "fp8" in kinds["self_attn"].weight
    assert not any(name.endswith("gate") for name in layers)  # the router


def test_a_vision_language_model(run):
    pytest.importorskip("PIL")
    _, _, output = run("vision_language.py")
    layers = read_contents(output).summary.layers
    assert len(layers) == 2 * 7
    assert all("language_model" in layer.name for layer in layers)
    assert (output / "tokenizer.json").is_file()
    assert list(output.glob("*processor_config.json"))


def test_a_file_for_llama_cpp(run, one_block):
    pytest.importorskip("gguf")
    _, figures, output = run("llama_cpp.py", "--model_dir", str(one_block), *FEW)
    assert figures["perplexity after"] == pytest.approx(figures["perplexity before"], rel=0.1)
    (file,) = output.glob("*.gguf")
    kinds = {layer.scheme.weight for layer in read_contents(file).summary.layers}
    assert kinds == {"Q4_1"}


@pytest.mark.nightly
def test_a_file_for_onnx_runtime(run, one_block, onnx_operators):
    pytest.importorskip("onnxruntime")
    _, figures, output = run("onnx_runtime.py", "--model_dir", str(one_block), *FEW)
    assert figures["same most probable token"] > 0.95
    assert (output / "quark_model.onnx").is_file()


def test_a_format_for_each_layer(run, one_block):
    arguments = ("--model_dir", str(one_block), "--target_bits", "4", *FEW)
    _, _, output = run("mixed_precision.py", *arguments)
    layers = read_contents(output).summary.layers
    kinds = {layer.scheme.weight for layer in layers}
    assert len(kinds) > 1
    assert sum(layer.bits for layer in layers) <= 4 * sum(layer.weights for layer in layers)
    assert "<html" in output.with_suffix(".html").read_text(encoding="utf-8")


NOTEBOOKS = [
    pytest.param("first_model"),
    pytest.param("convolutions"),
    pytest.param("algorithms", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_cells_of_a_notebook(name, one_block):
    """The cells run one after the other, on less data; they hold checks of their own."""
    cells = json.loads((EXAMPLES / f"notebooks/{name}.ipynb").read_text("utf-8"))["cells"]
    names, changes = {}, {"MODEL = model_directory()": f"MODEL = {str(one_block)!r}", **SHORTER}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        assert cell["outputs"] == [], "notebooks are kept without outputs"
        code = "".join(cell["source"])
        for before, after in changes.items():
            code = code.replace(before, after)
        exec(compile(code, name, "exec"), names)
    if name == "first_model":
        assert names["after"] == pytest.approx(names["before"], rel=0.2)
        assert 1_000_000 < names["size"] < 4_000_000
    elif name == "convolutions":
        assert min(names["accuracy"](names[graph]) for graph in ("quantized", "frozen")) > 0.95
    else:
        assert list(names["rows"]) == ["float", "rounding", "AWQ", "GPTQ", "Qronos"]
        assert all(0 < divergence < 1 for _, divergence in [*names["rows"].values()][1:])


@pytest.mark.nightly
def test_notebooks_in_a_kernel(tmp_path):
    """Jupyter runs the notebooks as they are, on the shipped model."""
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel")
    for path in sorted((EXAMPLES / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        nbclient.NotebookClient(notebook, resources={"metadata": {"path": tmp_path}}).execute()
        printed = [o.text for c in notebook.cells for o in c.get("outputs", []) if "text" in o]
        assert printed, path.name


def test_all_examples_are_listed():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = [*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.ipynb")]
    assert len(files) == 15
    assert [f.name for f in files if f"]({f.relative_to(EXAMPLES).as_posix()})" not in page] == []
    notebooks = {file.stem for file in files if file.suffix == ".ipynb"}
    assert notebooks == {case.values[0] for case in NOTEBOOKS}
