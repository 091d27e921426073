"""Values of quantized checkpoints that are not finite are refused by every reader of them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.cli.main import main
from quark.torch import ModelExporter, ModelImporter
from quark.torch.export.recognition import load_checkpoint, load_in_float
from tests.configurations import config, groups, spec

CT = "compressed-tensors"
LAYER = "model.layers.1.mlp.up_proj"
NORM = "model.norm.weight"
EXCLUDED = ("lm_head",)
# Layout, configuration: parts of names end differently in each layout.
LAYOUTS = {
    "quark": ("quark", config(groups("int4"))),
    "awq": ("awq", config(groups("uint4", False))),
    "gptq": ("gptq", config(groups("int4"))),
    CT: (CT, config(groups("int4"))),
    "mlx": ("mlx", config(groups("uint4", False))),
    "torchao": ("torchao", config(groups("int4"))),
    "fp8": ("fp8", config(spec("fp8_e4m3"), spec("fp8_e4m3", is_dynamic=True))),
}


@pytest.fixture
def damaged(build, quantize, export):
    """Export a model in a layout, with biases, and change the tensors of the files."""

    def damaged(change, layout="quark", configuration=None):
        mode, usual = LAYOUTS.get(layout, (layout, None))
        model = quantize(build(attention_bias=True), configuration or usual)
        path = export(model, custom_mode=mode)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata=_metadata(path))
        return path

    return damaged


def _metadata(path):
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as opened:
        return opened.metadata()


def run(model):
    with torch.no_grad():
        model(torch.tensor([[3, 4]]))


READERS = {
    "in memory": load_checkpoint,
    "in parts": lambda path: run(load_checkpoint(path, max_memory=1 << 40)),
    "in float": load_in_float,
    "in float, in parts": lambda path: run(load_in_float(path, max_memory=1 << 40)),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [NORM, "model.layers.0.self_attn.q_proj.bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.sampled(2, covers=True)
def test_parameters_in_float(damaged, layout, name, value):
    path = damaged(lambda tensors: tensors[name].view(-1)[3:4].fill_(value), layout)
    for read in READERS.values():
        with pytest.raises(ValueError, match=f"{name} has NaN or infinite values"):
            read(path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("dtype", "code"), [("fp8_e4m3", 0xFF), ("fp8_e5m2", 0x7C)])
def test_codes(damaged, dtype, code, reader):
    def change(tensors):
        tensors[f"{LAYER}.weight"].view(torch.uint8)[5, 7] = code

    path = damaged(change, configuration=config(spec(dtype)))
    with pytest.raises(ValueError, match=f"{LAYER}.weight has NaN or infinity among its codes"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_scales(damaged, reader):
    path = damaged(lambda t: t[f"{LAYER}.weight_scale"].view(-1)[:1].fill_(torch.inf))
    with pytest.raises(ValueError, match=f"{LAYER}.weight_scale: 1 of .* not sound"):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (NORM, torch.nan, f"{NORM} has NaN or infinite values"),
        (f"{LAYER}.weight_scale", torch.nan, f"{LAYER}.weight_scale: 1 of .* not sound"),
        (f"{LAYER}.weight_scale", torch.inf, f"{LAYER}.weight_scale: 1 of .* not sound"),
    ],
)
@pytest.mark.sampled(2, covers=True)
def test_the_native_format(build, quantize, tmp_path, name, value, message, reader):
    path = tmp_path / "native"
    ModelExporter(export_dir=path).export_quark_model(quantize(build(), config(groups("int4"))))
    tensors = torch.load(path / "model_state_dict.pth", weights_only=True)
    tensors[name].view(-1)[:1].fill_(value)
    torch.save(tensors, path / "model_state_dict.pth")
    with pytest.raises(ValueError, match=message):
        READERS[reader](path)


def test_the_architecture_of_the_caller(damaged, build, unchanged):
    path = damaged(lambda tensors: tensors[NORM].fill_(torch.nan))
    with pytest.raises(ValueError, match=f"{NORM} has NaN or infinite values"):
        ModelImporter(path, "safetensors").import_model_info(build(attention_bias=True))


def test_transformers(damaged):
    from transformers import AutoModelForCausalLM

    path = damaged(lambda tensors: tensors[NORM].fill_(torch.nan))
    with pytest.raises(ValueError, match=f"{NORM} has NaN or infinite values"):
        AutoModelForCausalLM.from_pretrained(path)


def test_the_command_line(damaged, tmp_path, capsys):
    path = damaged(lambda tensors: tensors[NORM].fill_(torch.nan))
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(path), str(tmp_path / "out"), "--to", "awq"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and f"{path}: {NORM} has NaN or infinite values" in said
    assert not (tmp_path / "out").exists()
