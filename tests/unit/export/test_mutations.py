"""Mutated files of checkpoints: read, or refused with one kind of error."""

import json

import pytest

from quark.torch import load_params, save_params
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import open_checkpoint, read_contents
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.mutations import mutations

pytestmark = pytest.mark.nightly


def survives(action, what):
    """Return whether an action succeeds; it may raise nothing but errors about values and files."""
    try:
        action()
    except (ValueError, OSError):
        return False
    except Exception as error:
        raise AssertionError(what) from error
    return True


@pytest.fixture(scope="module")
def models(build, quantize):
    """Small models by the format that they are written in."""
    int4 = quantize(build(num_hidden_layers=1), "uint4_wo_32")
    others = {"fp8": "fp8", "modelopt": "nvfp4", "mxfp8": "mxfp8"}
    made = {
        name: quantize(build(num_hidden_layers=1), Config(scheme(of), exclude=["lm_head"]))
        for name, of in others.items()
    }
    experts = Config(layer_quant_config={"*.experts.*": scheme("mxfp4_weight_only")})
    made["mxfp4"] = quantize(build("gpt_oss", num_hidden_layers=1, num_local_experts=4), experts)
    return {name: made.get(name, int4) for name in FORMATS}


@pytest.mark.parametrize("mode", FORMATS)
def test_sections(models, export, mode):
    path = export(models[mode], custom_mode=mode)
    config = json.loads((path / "config.json").read_text())
    opened = 0
    for what, section in mutations(config["quantization_config"], 60):
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        opened += survives(lambda: open_checkpoint(path), what)
        survives(lambda: read_contents(path), what)
    assert 0 < opened < 60


def test_models(models, export):
    path = export(models["quark"])
    config = json.loads((path / "config.json").read_text())
    section = config.pop("quantization_config")
    for what, changed in mutations(config, 60):
        (path / "config.json").write_text(json.dumps({**changed, "quantization_config": section}))
        survives(lambda: open_checkpoint(path), what)


def test_parameters(models, tmp_path):
    save_params(models["quark"], "small", export_dir=tmp_path / "out")
    file, tensors = tmp_path / "out" / "small.json", tmp_path / "out" / "small.safetensors"
    described = json.loads(file.read_text())
    loaded = 0
    for what, changed in mutations(described, 80):
        file.write_text(json.dumps(changed))
        loaded += survives(lambda: load_params(None, file, tensors), what)
    assert 0 < loaded < 80
