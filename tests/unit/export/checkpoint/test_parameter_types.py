"""Float tensors of quantized checkpoints whose types differ from those of the others."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter, ModelImporter
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.numerics.dtypes import type_name
from tests.configurations import config, groups

CONFIG = config(groups("int4"))
IDS = torch.tensor([[3, 4, 5]])
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
READERS = {
    "in memory": lambda path, _: load_checkpoint(path),
    "in parts": lambda path, _: load_checkpoint(path, max_memory=1 << 40),
    "in float": lambda path, _: load_in_float(path),
    "in float, in parts": lambda path, _: load_in_float(path, max_memory=1 << 40),
    "into a model": lambda path, model: ModelImporter(path).import_model_info(model),
}


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def rewrite(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", [NORM, EMBEDDING])
@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
)
def test_an_odd_type_is_converted(build, quantize, export, caplog, usual, odd, name, reader):
    path = export(quantize(build(dtype=usual), CONFIG))
    expected = logits(READERS[reader](path, build(dtype=usual)))
    assert "converted" not in caplog.text
    rewrite(path, lambda tensors: tensors.update({name: tensors[name].to(odd)}))
    model = READERS[reader](path, build(dtype=usual))
    types = f"from {type_name(odd)} to {type_name(usual)}"
    assert f"{name} is converted {types}" in caplog.text
    assert logits(model).equal(expected)  # the values fit the usual type
    assert model.get_parameter(name).dtype == usual


def test_values_are_rounded_once_as_transformers_does(build, quantize, export):
    from transformers import AutoModelForCausalLM

    path = export(quantize(build(dtype=torch.bfloat16), CONFIG))
    values = torch.linspace(0.5, 1.5, 64, dtype=torch.float64)
    rewrite(path, lambda tensors: tensors.update({NORM: values}))
    model, other = load_checkpoint(path), AutoModelForCausalLM.from_pretrained(path)
    assert model.get_parameter(NORM).equal(values.bfloat16())
    assert logits(model).equal(logits(other))


def test_values_that_overflow_are_refused(build, quantize, export):
    path = export(quantize(build(), CONFIG))
    values = torch.full((64,), 1e300, dtype=torch.float64)
    rewrite(path, lambda tensors: tensors.update({NORM: values}))
    with pytest.raises(ValueError, match=f"{NORM} has NaN or infinite values"):
        load_checkpoint(path)


def test_the_native_format_too(build, quantize, tmp_path):
    path = tmp_path / "out"
    ModelExporter(export_dir=path).export_quark_model(quantize(build(), CONFIG))
    expected = logits(load_checkpoint(path))
    file = path / "model_state_dict.pth"
    tensors = torch.load(file, weights_only=True)
    torch.save({**tensors, NORM: tensors[NORM].double()}, file)
    assert logits(load_checkpoint(path)).equal(expected)


def test_all_in_one_type_keep_it(build, quantize, export):
    """The parameters of a model in float32 take the type of the file, bfloat16 or float64."""
    for dtype in (torch.bfloat16, torch.float64):
        path = export(quantize(build(dtype=dtype), CONFIG))
        model = ModelImporter(path).import_model_info(build())
        assert {model.get_parameter(name).dtype for name in (NORM, EMBEDDING)} == {dtype}


class Mixed(torch.nn.Module):
    """A model whose norm is in float32 beside layers in bfloat16."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2)).bfloat16()
        self.last = torch.nn.Linear(32, 4).bfloat16()
        self.norm = torch.nn.LayerNorm(32)

    def forward(self, x):
        for layer in self.inner:
            x = layer(x)
        return self.last(self.norm(x.float()).bfloat16())


def test_types_that_a_model_has_are_kept(quantize, export):
    torch.manual_seed(0)
    model = quantize(Mixed(), config(groups("int4", size=32)))
    x = torch.randn(2, 32, dtype=torch.bfloat16)
    expected = model(x)
    loaded = ModelImporter(export(model)).import_model_info(Mixed())
    assert loaded.norm.weight.dtype == torch.float32
    assert loaded(x).equal(expected)


def test_what_transformers_keeps_in_float32_is_kept(build, quantize, export, monkeypatch):
    model = build(dtype=torch.float16)
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"norm"}, raising=False)
    path = export(quantize(model, CONFIG))
    rewrite(path, lambda tensors: tensors.update({NORM: tensors[NORM].float()}))
    assert load_checkpoint(path).get_parameter(NORM).dtype == torch.float32
