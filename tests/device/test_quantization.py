"""Models quantized on a device are those quantized on the CPU, for schemes and algorithms.

On the stand-in the results have the same bits. On an accelerator, weights and scales of schemes
agree within the rounding of float32. Algorithms choose between candidates there whose errors differ
by rounding alone, so what counts is how far the outputs are from those of the float model.
"""

import pytest
import torch

from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
    SparseGPTConfig,
    SVDQuantConfig,
    WandaConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.recipes import RECIPES, recipe
from tests.configurations import preset, quantized
from tests.device.stand_in import TYPE

# static, per token, integers, groups, asymmetric, two stages, shared exponents, two levels
SCHEMES = [
    "fp8",
    "ptpc_fp8",
    "int8",
    "int4_wo_32",
    "uint4_wo_32",
    "int4_fp8",
    "mxfp4",
    "mx6",
    "nvfp4",
]
ALGORITHMS = {
    "smoothquant": ("int8", SmoothQuantConfig()),
    "autosmoothquant": ("int8", AutoSmoothQuantConfig()),
    "awq": ("uint4_wo_32", AWQConfig()),
    "gptq": ("int4_wo_32", GPTQConfig()),
    "gptq in turn": ("nvfp4_weight_only", GPTQConfig(desc_act=True, true_sequential=True)),
    "gptaq": ("int4_wo_32", GPTAQConfig()),
    "qronos": ("int4_wo_32", QronosConfig()),
    "autoround": ("int4_wo_32", AutoRoundConfig(iters=3)),
    "rotation": ("int8", RotationConfig(r2=True, r4=True)),
    "quarot and gptq": ("int4_wo_32", QuaRotConfig(), GPTQConfig()),
    "awq and gptq": ("int4_wo_32", AWQConfig(), GPTQConfig()),
    "sparsegpt": ("int4_wo_32", SparseGPTConfig()),
    "wanda and gptq": ("int4_wo_32", WandaConfig(), GPTQConfig()),
    "svdquant": ("mxfp4", SVDQuantConfig(svd_rank=4, min_layer_size=0)),
    # Gradients row by row, and steps of training: many operations.
    "yaqa": ("int4_wo_32", YaqaConfig()),
    "spinquant": ("int8", RotationConfig(r2=True, trainable=True)),
}
SLOW = {"spinquant", "awq and gptq", "wanda and gptq"}


@pytest.fixture
def compare(plain, device, batches, logits, assert_close):
    """Quantize a model on the CPU and on the device, and compare the two."""

    def compare(config, name="llama", amplifies=False, **changes):
        here, there = plain(name, **changes), plain(name, **changes).to(device)
        outputs = logits(here)
        here, there = (quantized(model, config, batches) for model in (here, there))
        assert {x.device.type for x in there.state_dict().values()} == {torch.device(device).type}
        if amplifies and device != TYPE:
            errors = [(logits(m).cpu() - outputs).norm().item() for m in (here, there)]
            assert errors[1] <= 1.1 * errors[0]
            return
        assert_close(there.state_dict(), here.state_dict(), device)
        assert_close({"logits": logits(there)}, {"logits": logits(here)}, device)

    return compare


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(compare, name):
    compare(preset(name))


def test_static_scales_with_key_value_cache(compare):
    compare(with_kv_cache(preset("fp8"), ["*k_proj", "*v_proj"], "fp8", post_rope=True))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in ALGORITHMS],
)
@pytest.mark.sampled(3)
def test_algorithms(compare, name):
    scheme, *algorithms = ALGORITHMS[name]
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    changes = sizes if name == "yaqa" else {}
    compare(preset(scheme, *algorithms), amplifies=True, **changes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(compare, name):
    scheme, algorithms = recipe(name)
    changes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128}
    compare(preset(scheme, *algorithms), amplifies=True, **changes)
