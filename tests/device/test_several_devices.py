"""A model whose blocks lie on several devices, as ``device_map`` of Transformers puts them."""

import pytest
from accelerate import dispatch_model

from quark.torch import ModelImporter, collect_statistics, export_safetensors
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.kv_cache import with_kv_cache
from tests.configurations import preset, quantized
from tests.device.test_checkpoints import contents

FIRST, SECOND = "standin:0", "standin:1"
CONFIGS = {
    "fp8": with_kv_cache(preset("fp8"), ["*k_proj", "*v_proj"], "fp8"),
    "nvfp4": preset("nvfp4"),
    "smoothquant": preset("int8", SmoothQuantConfig()),
    "autosmoothquant": preset("int8", AutoSmoothQuantConfig()),
    "awq": preset("uint4_wo_32", AWQConfig()),
    "gptq": preset("int4_wo_32", GPTQConfig()),
    "gptaq": preset("int4_wo_32", GPTAQConfig()),
    "yaqa": preset("int4_wo_32", YaqaConfig()),
    "autoround": preset("int4_wo_32", AutoRoundConfig(iters=3)),
    "quarot": preset("int8", QuaRotConfig()),
    "spinquant": preset("int8", RotationConfig(r2=True, trainable=True)),
}
SLOW = {"awq", "gptaq", "yaqa", "spinquant", "autosmoothquant"}


@pytest.fixture
def divided(standin):
    """Put the blocks of a model on two devices in turn, the rest on the second."""

    def divided(model):
        names = [name for name, _ in model.named_children() if name != "model"]
        names += [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
        places = dict.fromkeys(names, SECOND)
        places |= {
            f"model.layers.{i}": (FIRST, SECOND)[i % 2] for i in range(len(model.model.layers))
        }
        return dispatch_model(model, places, main_device=SECOND, force_hooks=True)

    return divided


def devices(model):
    return {name: str(x.device) for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in CONFIGS]
)
@pytest.mark.sampled(2)
def test_quantization(name, divided, plain, batches, assert_close):
    model = divided(plain())
    before = devices(model)
    assert {before[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)} == {FIRST, SECOND}
    there = quantized(model, CONFIGS[name], batches)
    assert devices(there) == before
    here = quantized(plain(), CONFIGS[name], batches)
    assert_close(there.state_dict(), here.state_dict(), "standin")
    ids = batches[0]
    assert there(ids).logits.cpu().equal(here(ids).logits)


def test_checkpoint(divided, plain, batches, tmp_path):
    config = preset("int4_wo_32")
    here, there = quantized(plain(), config, batches), quantized(divided(plain()), config, batches)
    for name, model in (("here", here), ("there", there)):
        export_safetensors(model, tmp_path / name)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")
    read = ModelImporter(tmp_path / "there", "safetensors").import_model_info(divided(plain()))
    assert read(batches[0]).logits.cpu().equal(here(batches[0]).logits)


def test_statistics(divided, plain, batches):
    here, there = (
        collect_statistics(plain(), batches),
        collect_statistics(divided(plain()), batches),
    )
    assert there.probes == here.probes
    assert all(there.inputs[name].total.equal(gram.total) for name, gram in here.inputs.items())
