"""Defaults and modes of torch that an application sets do not change what quantization computes."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics, import_model_from_safetensors
from quark.torch.quantization.config.config import (
    AutoRoundConfig,
    AWQConfig,
    GPTQConfig,
    RotationConfig,
    YaqaConfig,
)
from quark.torch.statistics.files import save_statistics

ALGORITHMS = {
    "awq": ("int4_wo_32", AWQConfig()),
    "autoround": ("int4_wo_32", AutoRoundConfig(iters=2)),
    "gptq": ("int4_wo_32", GPTQConfig()),
    "yaqa": ("int4_wo_32", YaqaConfig()),
    "rotation": ("int4_wo_32", RotationConfig()),
    "static": ("w_int8_a_int8_per_tensor_sym", None),
    "percentile": ("w_int8_per_tensor_percentile", None),
    "two_levels": ("nvfp4", None),
}


@contextmanager
def default_type(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device():
    torch.set_default_device("meta")  # tensors that follow it have no values
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "bfloat16": lambda: default_type(torch.bfloat16),
    "float64": lambda: default_type(torch.float64),
    "device": default_device,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}


@pytest.fixture(scope="module")
def quantized(build, batches, config_of):
    """Quantize a model by the name of an algorithm, and return its tensors."""
    usual = {}

    def quantized(name, mode=None):
        if mode is None and name in usual:
            return usual[name]
        scheme, algorithm = ALGORITHMS[name]
        model, config = build(), config_of(scheme, algo_config=algorithm)
        with MODES[mode]() if mode else nullcontext():
            data = [batch.clone() for batch in batches]
            ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))
        usual[name] = usual.get(name, model.state_dict())
        return model.state_dict()

    return quantized


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.sampled(3, covers=True)
def test_quantization_is_the_same(quantized, name, mode):
    usual, given = quantized(name), quantized(name, mode)
    assert usual.keys() == given.keys()
    for key, tensor in usual.items():
        torch.testing.assert_close(given[key], tensor, rtol=0, atol=0, msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_the_same(build, batches, tmp_path, mode):
    save_statistics(collect_statistics(build(), batches), tmp_path / "usual")
    with MODES[mode]():
        statistics = collect_statistics(build(), [batch.clone() for batch in batches])
    save_statistics(statistics, tmp_path / "given")
    usual, given = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("usual", "given")
    )
    assert usual == given


def test_a_model_made_in_inference_mode_is_quantized_in_it(build, batches, config_of, logits):
    with torch.inference_mode():
        model = ModelQuantizer(config_of("int8")).quantize_model(build(), batches)
        given = logits(ModelQuantizer.freeze(model))
    usual = ModelQuantizer(config_of("int8")).quantize_model(build(), batches)
    assert torch.equal(logits(ModelQuantizer.freeze(usual)), given)


@pytest.mark.parametrize("scheme", ["int4_wo_32", "nvfp4", "iq4_nl"])
def test_loaded_layers_ignore_the_default_type(build, export, config_of, quantize, logits, scheme):
    model = import_model_from_safetensors(None, export(quantize(build(), scheme)))
    expected = logits(model)
    with default_type(torch.bfloat16):
        assert torch.equal(logits(model), expected)
