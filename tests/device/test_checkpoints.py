"""Checkpoints of a model on a device: the files of the CPU, and a model that generates there."""

from importlib.util import find_spec

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import (
    ModelExporter,
    ModelImporter,
    export_gguf,
    export_onnx,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.export.formats.registry import FORMATS
from tests.configurations import config, half_groups, preset, quantized
from tests.device.stand_in import TYPE

SCHEMES = ("int4_wo_32", "fp8", "int8", "mxfp8")  # every format holds one of them


@pytest.fixture
def both(plain, device, batches):
    """Return the same model quantized on the CPU, and moved to the device."""

    def both(scheme, **changes):
        configuration = preset(scheme) if isinstance(scheme, str) else scheme
        changes = {"num_hidden_layers": 1, **changes}
        here, there = (quantized(plain(**changes), configuration, batches) for _ in range(2))
        return here, there.to(device)

    return both


def contents(directory):
    """Return the bytes of all files below a directory by name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_generates(model, expected, device):
    """Compare greedy generation with another model, whose device may be the CPU."""
    ids = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(4))
    made = [
        m.generate(ids.to(m.device), max_new_tokens=8, do_sample=False, pad_token_id=0).cpu()
        for m in (model, expected)
    ]
    assert model.device.type == torch.device(device).type
    if device == TYPE:
        assert made[0].equal(made[1])
    else:  # ties of rounding may differ
        assert made[0].shape == made[1].shape


@pytest.mark.parametrize("mode", [name for name in FORMATS if name != "mxfp4"])  # of experts
@pytest.mark.sampled(3)
def test_formats(mode, both, plain, device, tmp_path):
    for scheme in SCHEMES:
        here, there = both(scheme)
        try:
            ModelExporter(tmp_path / "here").export_safetensors_model(here, custom_mode=mode)
        except ValueError:
            continue
        ModelExporter(tmp_path / "there").export_safetensors_model(there, custom_mode=mode)
        break
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    empty = plain(num_hidden_layers=1).to(device)
    read = ModelImporter(tmp_path / "there", "safetensors").import_model_info(empty)
    assert_generates(read, here, device)


def test_native_format(both, plain, device, tmp_path):
    here, there = both("nvfp4")
    for name, model in (("here", here), ("there", there)):
        ModelExporter(tmp_path / name).export_quark_model(model)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    empty = plain(num_hidden_layers=1).to(device)
    read = ModelImporter(tmp_path / "there").import_model_info(empty)
    assert_generates(read, here, device)


def test_model_that_is_built_on_the_device(both, device, tmp_path):
    here, there = both("mxfp4")
    export_safetensors(there, tmp_path / "out")
    read = import_model_from_safetensors(None, tmp_path / "out", device=device)
    assert_generates(read, here, device)


def test_frozen_model_generates(both, device):
    here, there = both("uint4_wo_32")
    assert_generates(there, here, device)


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")
def test_gguf(both, device, tmp_path):
    here, there = both(config(half_groups("int4")), vocab_size=2048)
    for name, model in (("here", here), ("there", there)):
        export_gguf(model, tmp_path / name, "small", model_directory())
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_onnx(device, tmp_path, onnx_operators):
    made = {}
    for place in ("cpu", device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        model = quantized(model, preset("int4_wo_32")).to(place)
        export_onnx(model, tmp_path / place, torch.ones(3, 64, device=place))
        made[place] = contents(tmp_path / place)
    assert made["cpu"] == made[device]
