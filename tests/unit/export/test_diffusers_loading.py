"""diffusers loads pipelines of this package itself, with the bits and checks of load_pipeline."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import (
    export_pipeline,
    load_pipeline,
    quantize_pipeline,
    register_with_diffusers,
)
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.diffusers_loading import import_diffusers
from tests.models.diffusion import CALL, DECODER, config_of, dit_pipeline, image

pytestmark = pytest.mark.client("diffusers")


@pytest.fixture
def pipeline():
    return dit_pipeline()


@pytest.fixture
def registered(monkeypatch):
    """Quantizers of diffusers with that of this package, until the test ends."""
    from diffusers.quantizers import auto

    for name in ("AUTO_QUANTIZER_MAPPING", "AUTO_QUANTIZATION_CONFIG_MAPPING"):
        monkeypatch.setattr(auto, name, dict(getattr(auto, name)))
    register_with_diffusers()
    register_with_diffusers()  # again


def _same_state(a, b):
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.dtype == states[1][name].dtype, name
        bits = [v.reshape(-1).view(torch.uint8) for v in (value, states[1][name])]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("size", [None, 20_000], ids=["one file", "shards"])
def test_from_pretrained_of_diffusers(pipeline, registered, size, tmp_path, monkeypatch):
    diffusers = import_diffusers()
    if size is not None:
        settings = partial(ExportSettings, max_shard_size=size)
        monkeypatch.setattr("quark.torch.diffusion.ExportSettings", settings)
    quantize_pipeline(pipeline, {"transformer": config_of("mxfp4"), "vae": DECODER}, [CALL])
    after = image(pipeline)
    export_pipeline(pipeline, tmp_path / "out")
    assert len(list((tmp_path / "out/transformer").glob("*.safetensors"))) == (5 if size else 1)
    loaded = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out")
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(image(loaded), after)
    ours = load_pipeline(tmp_path / "out")
    for name in ("transformer", "vae"):
        _same_state(getattr(loaded, name), getattr(ours, name))
    with pytest.raises(ValueError, match="export_safetensors"):
        loaded.save_pretrained(tmp_path / "again")
    export_pipeline(loaded, tmp_path / "out", overwrite=True)
    _same_state(load_pipeline(tmp_path / "out").transformer, ours.transformer)


def test_types_and_devices_of_diffusers(pipeline, registered, tmp_path):
    """Scales keep their type; the rest has the type that was asked for."""
    diffusers = import_diffusers()
    quantize_pipeline(pipeline, {"transformer": config_of("fp8")}, [CALL])
    export_pipeline(pipeline, tmp_path / "out")
    load = partial(diffusers.DiTTransformer2DModel.from_pretrained, tmp_path / "out/transformer")
    state, half = (load(**given).state_dict() for given in ({}, {"dtype": torch.bfloat16}))
    for name, value in half.items():
        is_scale = name.endswith("_quantizer.scale")
        expected = state[name].dtype if is_scale else torch.bfloat16
        assert value.dtype in (expected, torch.float8_e4m3fn), name
    assert any(name.endswith("_quantizer.scale") for name in half)
    _same_state(load(device_map={"": "cpu"}), load())
    with pytest.raises(ValueError, match="device_map puts a part"):
        load(device_map={"": "disk"}, offload_folder=tmp_path / "offload")


def test_from_pretrained_is_strict(pipeline, registered, tmp_path):
    """diffusers alone leaves missing tensors on the meta device, and ignores others."""
    diffusers = import_diffusers()
    quantize_pipeline(pipeline, {"transformer": config_of("int8_wo")})
    export_pipeline(pipeline, tmp_path / "out")
    path = tmp_path / "out/transformer/diffusion_pytorch_model.safetensors"
    whole = load_file(path)
    scale = next(name for name in whole if name.endswith("weight_scale"))
    without = {name: value for name, value in whole.items() if name != scale}
    damages = {
        "missing": without,
        "is torch": {**whole, scale: whole[scale].repeat(2)},
        "unexpected": {**whole, "transformer_blocks.9.weight": torch.ones(1)},
        "scale": {**whole, scale: whole[scale] * torch.nan},
    }
    for message, tensors in damages.items():
        save_file(tensors, path)
        for load in (diffusers.DiffusionPipeline.from_pretrained, load_pipeline):
            with pytest.raises(ValueError, match=message):
                load(tmp_path / "out")


def test_a_method_of_diffusers_is_not_replaced(registered):
    from diffusers.quantizers import auto

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["quark"] = object
    with pytest.raises(ValueError, match="has a method 'quark' already"):
        register_with_diffusers()
