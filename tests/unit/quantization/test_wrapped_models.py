"""Models that are wrapped, or saved by Transformers, get an answer that helps."""

import copy
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.torch import ModelExporter, ModelImporter, ModelQuantizer, export_safetensors


class PeftModel(nn.Module):
    """A stand-in for the class of peft, which is recognized by its module."""

    __module__ = "peft.peft_model"

    def __init__(self, model):
        super().__init__()
        self.base_model = model


class LoraLinear(nn.Linear):
    __module__ = "peft.tuners.lora.layer"


def adapted(model):
    model.model.layers[0].mlp.up_proj = LoraLinear(64, 96)
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


WRAPPED = {
    "compiled": (lambda m: torch.compile(m, backend="eager"), "give model._orig_mod"),
    "compiled in place": (compiled_in_place, "compile the quantized model"),
    "parallel": (nn.DataParallel, "give model.module"),
    "adapter": (PeftModel, r"model = model\.merge_and_unload\(\)"),
    "adapter inside": (adapted, r"at model\.layers\.0\.mlp\.up_proj: merge them"),
}


@pytest.mark.parametrize(("wrap", "said"), WRAPPED.values(), ids=WRAPPED)
def test_wrapped_models(build, quantize, config_of, tmp_path, wrap, said):
    with pytest.raises(TypeError, match=said):
        ModelQuantizer(config_of("int8_wo")).quantize_model(wrap(build()))
    model = wrap(quantize(build(), "int8_wo"))
    for write in ("export_safetensors_model", "export_quark_model"):
        with pytest.raises(TypeError, match=said):
            getattr(ModelExporter(tmp_path / "out"), write)(model)
    with pytest.raises(TypeError, match=said):
        ModelQuantizer.freeze(model)
    assert list(tmp_path.iterdir()) == []


def test_wrapped_models_are_not_filled(build, quantize, export):
    path = export(quantize(build(), "int8_wo"))
    with pytest.raises(TypeError, match=r"give model\.module"):
        ModelImporter(path, "safetensors").import_model_info(nn.DataParallel(build()))


def test_real_adapters(build, config_of):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match="merge_and_unload"):
        ModelQuantizer(config_of("int8_wo")).quantize_model(model)


def frozen(build, quantize, export):
    return quantize(build(), "int8_wo")


def fake(build, quantize, export):
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.presets import scheme

    return ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(build())


def packed(build, quantize, export):
    path = export(frozen(build, quantize, export))
    return ModelImporter(path, "safetensors").import_model_info(build())


def loaded(build, quantize, export):
    return AutoModelForCausalLM.from_pretrained(export(frozen(build, quantize, export)))


@pytest.mark.parametrize("make", [frozen, fake, packed, loaded])
def test_saving_without_scales_is_refused(build, quantize, export, tmp_path, make):
    model = make(build, quantize, export)
    for given in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"call quark\.torch\.export_safetensors\("):
            given.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("make", [frozen, packed, loaded])
def test_the_way_to_go(build, quantize, export, logits, tmp_path, make):
    model = make(build, quantize, export)
    export_safetensors(model, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))


def test_such_models_are_pickled(build, quantize):
    torch.save(quantize(build(), "int8_wo"), io.BytesIO())


def test_a_failure_leaves_the_model_as_it_was(build, config_of, tmp_path):
    model = build()
    with pytest.raises(ValueError, match="calibration data"):
        ModelQuantizer(config_of("int8")).quantize_model(model)
    model.save_pretrained(tmp_path / "saved")
