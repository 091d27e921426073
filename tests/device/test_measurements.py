"""Statistics, mixtures of formats, reports and perplexity, measured on a device."""

from dataclasses import asdict

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics, export_safetensors
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.report.measurement import measure
from quark.torch.search.mixtures import measure_costs
from tests.configurations import preset, quantized
from tests.device.stand_in import TYPE

WINDOWS = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def tolerance(device):
    """Relative tolerance: none on the stand-in, which computes on the CPU."""
    return 0 if device == TYPE else 1e-3


@pytest.fixture
def statistics(plain, device, batches):
    """Statistics collected on the CPU and on the device."""
    return [collect_statistics(plain().to(place), batches) for place in ("cpu", device)]


def test_statistics(statistics, tolerance):
    here, there = statistics
    assert here.model == there.model
    assert here.tokens == there.tokens
    for name, gram in here.inputs.items():
        total = there.inputs[name].total
        torch.testing.assert_close(total, gram.total, rtol=tolerance, atol=tolerance)
    for name, probe in here.probes.items():
        assert there.probes[name].sensitivity == pytest.approx(probe.sensitivity, rel=tolerance)


def test_statistics_in_the_place_of_data(statistics, plain, device, assert_close):
    made = {}
    for place in ("cpu", device):
        quantizer = ModelQuantizer(preset("fp8"))
        model = quantizer.quantize_model(plain().to(place), statistics=statistics[0])
        made[place] = ModelQuantizer.freeze(model).state_dict()
    assert_close(made[device], made["cpu"], device)


def test_gptq_from_statistics(statistics, plain, device, assert_close):
    made = {}
    for place in ("cpu", device):
        quantizer = ModelQuantizer(preset("int4_wo_32", GPTQConfig()))
        model = quantizer.quantize_model(plain().to(place), statistics=statistics[0])
        made[place] = ModelQuantizer.freeze(model).state_dict()
    assert_close(made[device], made["cpu"], device, rtol=0.1)


def test_costs_of_formats(statistics, plain, device, tolerance):
    formats = {name: scheme(name) for name in ("int3_wo_32", "uint4_wo_32", "int8", "nvfp4")}
    here, there = (
        measure_costs(plain().to(place), statistics[0], formats) for place in ("cpu", device)
    )
    assert [unit.layers for unit in here] == [unit.layers for unit in there]
    for mine, other in zip(there, here, strict=True):
        assert mine.bits == other.bits
        assert mine.losses == pytest.approx(other.losses, rel=tolerance)


def test_report(plain, batches, device, tolerance, tmp_path):
    plain().save_pretrained(tmp_path / "float")
    export_safetensors(quantized(plain(), preset("int8"), batches), tmp_path / "out")
    here, there = (
        measure(tmp_path / "out", tmp_path / "float", WINDOWS, device=place)
        for place in ("cpu", device)
    )
    for mine, other in zip(there.layers, here.layers, strict=True):
        assert mine.error.relative == pytest.approx(other.error.relative, rel=tolerance)
        assert mine.output_error == pytest.approx(other.output_error, rel=1e-4)
    assert asdict(there.predictions) == pytest.approx(asdict(here.predictions), rel=1e-4)


def test_perplexity(plain, device, tolerance):
    here, there = (perplexity(plain().to(place), WINDOWS) for place in ("cpu", device))
    assert there == pytest.approx(here, rel=tolerance)
