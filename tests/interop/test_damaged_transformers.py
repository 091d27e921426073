"""Damaged checkpoints in Transformers, which does not tell our layers about missing tensors."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from quark.torch.quantization.nn.packed import PackedLayer

LAYER = "model.layers.0.mlp.up_proj"
SCALE = f"{LAYER}.weight_scale"
SCHEMES = ["fp8", "int4_wo_32", "mxfp4", "int8"]
# Headers are checked if the class is the one in config.json; layers check themselves always.
CLASSES = {"headers": AutoModelForCausalLM, "layers": AutoModel}


@pytest.fixture(scope="module")
def sound(build, quantize, tmp_path_factory):
    """Return the directory of a sound checkpoint of a scheme."""
    from quark.torch import export_safetensors

    directory = tmp_path_factory.mktemp("sound")

    def sound(name):
        path = directory / name
        if not path.exists():
            export_safetensors(quantize(build(), name), path)
        return path

    return sound


@pytest.fixture
def damaged(sound, tmp_path):
    """Return a copy of a checkpoint with tensors changed."""

    def damaged(name, change):
        path = tmp_path / "damaged"
        shutil.copytree(sound(name), path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return damaged


def refused(cls, path, said):
    with pytest.raises(ValueError, match=said) as caught:
        cls.from_pretrained(path)
    return str(caught.value)


@pytest.mark.parametrize("door", CLASSES)
@pytest.mark.parametrize("name", SCHEMES)
class TestRefused:
    @pytest.mark.parametrize("part", ["weight", "weight_scale"])
    @pytest.mark.sampled(2, covers=True)
    def test_missing(self, damaged, name, door, part):
        path = damaged(name, lambda tensors: tensors.pop(f"{LAYER}.{part}"))
        refused(CLASSES[door], path, rf"layers.0.mlp.up_proj.{part} is missing")

    def test_renamed(self, damaged, name, door):
        path = damaged(name, lambda t: t.update({f"{LAYER}.wait": t.pop(f"{LAYER}.weight")}))
        refused(CLASSES[door], path, "layers.0.mlp.up_proj.weight is missing")

    @pytest.mark.sampled(2, covers=True)
    def test_another_type(self, damaged, name, door):
        path = damaged(name, lambda t: t.update({SCALE: t[SCALE].to(torch.int32)}))
        refused(CLASSES[door], path, "layers.0.mlp.up_proj.weight_scale is torch.int32")

    def test_scales_that_are_not_sound(self, damaged, name, door):
        def change(tensors):
            scale = tensors[SCALE]
            scale.view(-1)[0] = 255 if scale.dtype == torch.uint8 else torch.nan

        said = refused(CLASSES[door], damaged(name, change), "not sound, such as nan")
        assert "layers.0.mlp.up_proj.weight_scale: 1 of" in said

    def test_truncated(self, sound, tmp_path, name, door):
        path = tmp_path / "cut"
        shutil.copytree(sound(name), path)
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[:-100])
        with pytest.raises(Exception, match=r"safetensors|incomplete|damaged"):
            CLASSES[door].from_pretrained(path)


@pytest.mark.parametrize("door", CLASSES)
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf])
@pytest.mark.parametrize(("name", "tensor"), [("fp8", "weight"), ("int8", "input")])
def test_scales_without_meaning(damaged, name, tensor, value, door):
    path = damaged(name, lambda t: t[f"{LAYER}.{tensor}_scale"].fill_(value))
    refused(CLASSES[door], path, f"up_proj.{tensor}_scale: 1 of 1 scales of its {tensor}.* sound")


def test_codes_of_another_float_are_not_cast(damaged):
    """Transformers casts floats to the type that a layer has: codes would change in silence."""
    key = f"{LAYER}.weight"
    path = damaged("fp8", lambda t: t.update({key: t[key].view(torch.float8_e5m2)}))
    refused(AutoModelForCausalLM, path, "up_proj.weight is torch.float8_e5m2")


def test_a_zero_point_that_is_known_may_be_missing(damaged, sound, logits):
    keys = [f"{LAYER}.input_zero_point", f"{LAYER}.weight_zero_point"]
    path = damaged("int8", lambda tensors: [tensors.pop(key) for key in keys])
    expected = logits(AutoModelForCausalLM.from_pretrained(sound("int8")))
    for _ in range(3):  # memory that was used before is not zero
        model = AutoModelForCausalLM.from_pretrained(path)
        layer = model.model.layers[0].mlp.up_proj
        assert layer.input_quantizer.zero_point == 0 == layer.weight_quantizer.zero_point
        assert torch.equal(logits(model), expected)


def test_a_sound_model_is_checked_once(sound, logits):
    model = AutoModelForCausalLM.from_pretrained(sound("int8"))
    assert all(m._finish is None for m in model.modules() if isinstance(m, PackedLayer))
    other = copy.deepcopy(model).to(torch.device("cpu")).train().eval()
    assert torch.equal(logits(other), logits(model))


def test_a_quantized_head_that_no_file_holds(sound):
    """The configuration quantizes every layer but ``lm_head``, so also that of a classifier."""
    from transformers import AutoModelForSequenceClassification

    refused(AutoModelForSequenceClassification, sound("int8"), "score.weight is missing")
