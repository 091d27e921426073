"""The Python blocks of the documents run as they are printed.

A test first defines the names that a block needs.
"""

import json
import shutil

import pytest

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.export.recognition import load_checkpoint, read_contents
from quark.torch.quantization.nn.layer import QuantizedLayer
from tests.contract.blocks import ROOT, blocks_to_run

PYTHON = blocks_to_run("python")
MODEL = """
import torch
from transformers import AutoModelForCausalLM
from quark.torch import LLMTemplate, ModelQuantizer

def quantize(model, scheme):
    config = LLMTemplate.get("llama").get_config(scheme=scheme)
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [ids]))

ids = torch.arange(24)[None] + 5
mask = torch.ones_like(ids)
batches = dataloader = [ids]
model = AutoModelForCausalLM.from_pretrained("MODEL", dtype=torch.float32)
architecture = model
config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
"""
PICTURES = f"""
import runpy
from pathlib import Path
import torch
runpy.run_path({str(ROOT / "examples/vision_language.py")!r})["make_material"](Path("LLAVA"))
network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
images = [torch.randn(4, 3, 8, 8)]
"""
TEACHER = """
from quark.torch.training import distillation_loss
from quark.torch.quantization import Config, QATSpec, QuantizationConfig, QuantizationSpec
spec = QuantizationSpec("int8", qscheme="per_tensor", symmetric=True, qat_spec=QATSpec())
model = ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(model)
"""
# Document -> what its blocks take for granted.
BEFORE = {
    "docs/algorithms.md": MODEL + "batches = dataloader = [ids, ids.flip(1)]",
    "docs/compile.md": MODEL + "model = quantize(model, 'int8'); ids = ids.repeat(2, 1)",
    "docs/mixed-precision.md": MODEL
    + "config = LLMTemplate.get('llama').get_config(scheme='int4_wo_32', algorithm='gptq')",
    "docs/onnx.md": MODEL + "model = quantize(model, 'int8')",
    "docs/other-models.md": PICTURES,
    "docs/serve.md": """
from typer.testing import CliRunner
from quark.cli.main import app
flags = "--model_dir MODEL --output_dir INT8-ONNX --quant_scheme int8_wo --data_type float32 "
more = "--model_export onnx --use_cache --skip_evaluation"
assert CliRunner().invoke(app, f"quantize {flags} {more}".split()).exit_code == 0
""",
    "docs/training.md": MODEL + TEACHER,
    "docs/graph-mode.md": "",
    "docs/graph-passes.md": "",
}


def files(folder, names):
    """Whether files or directories exist."""
    return all((folder / name).exists() for name in names.split())


def has_quantizers(model):
    return any(isinstance(module, QuantizedLayer) for module in model.modules())


# Document -> whether its blocks did what they say.
DONE = {
    "docs/algorithms.md": lambda names, folder: files(folder, "llama-merged llama-int4"),
    "docs/calibration.md": lambda names, folder: (
        len(names["sequences"]) == 8 and has_quantizers(names["model"])
    ),
    "docs/checkpoint-format.md": lambda names, folder: names["config"].layer_quant_config,
    "docs/choosing-a-scheme.md": lambda names, folder: names["inputs"].scheme.four_over_six,
    "docs/command-line.md": lambda names, folder: len(read_contents(folder / "OUT").summary.layers),
    "docs/compile.md": lambda names, folder: names["program"].module()(names["ids"]).logits.shape,
    "docs/graph-mode.md": lambda names, folder: files(folder, "OUT TENSORS ONNX"),
    "docs/graph-passes.md": lambda names, folder: names["config"].shift_limits.cut == (0, 16),
    "docs/large-models.md": lambda names, folder: has_quantizers(names["model"]),
    "docs/mixed-precision.md": lambda names, folder: files(folder, "STATISTICS"),
    "docs/onnx.md": lambda names, folder: len(names["session"].get_inputs()) == 2,
    "docs/other-models.md": lambda names, folder: has_quantizers(names["network"]),
    "docs/python.md": lambda names, folder: (
        any(node.op == "call_module" for node in names["graph"].graph.nodes)
        and not has_quantizers(names["model"])  # the page only makes configurations for it
    ),
    "docs/runtime.md": lambda names, folder: names["model"](names["ids"]).logits.isfinite().all(),
    "docs/serve.md": lambda names, folder: names["tokenizer"].decode(names["tokens"]),
    "docs/training.md": lambda names, folder: len(names["optimizer"].param_groups[1]["params"]),
}
SLOW = {
    "docs/compile.md",
    "docs/onnx.md",
    "docs/graph-mode.md",
    "docs/serve.md",
}  # each traces for seconds


@pytest.fixture
def place(tmp_path, one_block, monkeypatch):
    """A directory with a model, a quantized one, and options."""
    shutil.copytree(one_block, tmp_path / "MODEL")
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    model = ModelQuantizer(config).quantize_model(load_checkpoint(one_block))
    export_safetensors(ModelQuantizer.freeze(model), tmp_path / "INT4")
    (tmp_path / "awq.json").write_text(json.dumps({"name": "awq"}), encoding="utf-8")
    (tmp_path / "smooth.json").write_text('{"name": "smooth", "alpha": 0.5}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "document",
    [pytest.param(d, marks=[pytest.mark.nightly] if d in SLOW else []) for d in sorted(PYTHON)],
)
def test_python(document, place):
    names = {}
    exec(BEFORE.get(document, MODEL), names)
    for number, block in enumerate(PYTHON[document]):
        exec(compile(block.code, f"{document}, block {number}", "exec"), names)
    assert DONE[document](names, place)


def test_every_document_is_checked():
    assert set(PYTHON) == set(DONE)
