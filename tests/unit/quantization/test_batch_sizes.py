"""The size of the batches changes no bit of a quantized model."""

from dataclasses import replace

import pytest
import torch

from quark.torch.pipeline.statistics import digest
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    RotationConfig,
    SmoothQuantConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.presets import kv_cache_scheme
from tests.configurations import preset, quantized
from tests.models.architectures import varied

IDS = torch.randint(3, 64, (9, 256), generator=torch.Generator().manual_seed(1))  # 2 chunks
AUTOROUND = AutoRoundConfig(iters=2, batch_size=2)
ALGORITHMS = {
    "static fp8 with cache": ("fp8",),
    "awq": ("uint4_wo_32", AWQConfig()),
    "gptq": ("int4_wo_32", GPTQConfig()),
    "gptaq": ("int4_wo_32", GPTAQConfig()),
    "qronos": ("int4_wo_32", QronosConfig()),
    "yaqa": ("int4_wo_32", YaqaConfig()),
    "autoround": ("int4_wo_32", AUTOROUND),
    "smooth": ("int8", SmoothQuantConfig()),
    "autosmoothquant": ("int8", AutoSmoothQuantConfig()),
    "rotation, gptq": ("int4_wo_32", RotationConfig(), GPTQConfig()),
}


def bits(name, data, *algorithms):
    """Digests of the tensors of a model quantized on some data."""
    config = preset(name, *algorithms)
    if not algorithms:
        cache = ["*k_proj", "*v_proj"]
        layer = replace(config.global_quant_config, output_tensors=kv_cache_scheme("fp8"))
        config.layer_quant_config = dict.fromkeys(cache, layer)
        config.kv_cache_quant_config = dict.fromkeys(cache, layer)
    model = quantized(varied("llama", num_hidden_layers=2), config, data)
    return {name: digest(x) for name, x in model.state_dict().items()}


QUICK = ("static fp8 with cache", "awq", "gptq", "autoround")  # the others are nightly tests
CASES = [
    pytest.param(case, id=name, marks=[] if name in QUICK else pytest.mark.nightly)
    for name, case in ALGORITHMS.items()
]


@pytest.mark.parametrize("algorithms", CASES)
def test_batch_sizes(algorithms):
    name, *rest = algorithms
    single = bits(name, torch.split(IDS, 1), *rest)
    for size in (2, 7):
        assert bits(name, torch.split(IDS, size), *rest) == single
