"""Models whose blocks are brought to a device one after the other: the files of the CPU."""

import pytest
import torch

from quark.torch import export_safetensors
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.export.recognition import load_checkpoint
from quark.torch.graph.residency import residency_of
from quark.torch.quantization.config.algo import (
    AWQConfig,
    GPTQConfig,
    QuaRotConfig,
    SmoothQuantConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.kv_cache import with_kv_cache
from tests.configurations import preset, quantized
from tests.device.stand_in import TYPE, counted
from tests.device.test_checkpoints import contents

PLENTY = 1 << 40
CONFIGS = {
    "fp8": with_kv_cache(preset("fp8"), ["*k_proj", "*v_proj"], "fp8"),
    "nvfp4": preset("nvfp4"),
    "smoothquant": preset("int8", SmoothQuantConfig()),
    "awq": preset("uint4_wo_32", AWQConfig()),
    "gptq": preset("int4_wo_32", GPTQConfig()),
    "quarot and gptq": preset("int4_wo_32", QuaRotConfig(), GPTQConfig()),
    "yaqa": preset("int4_wo_32", YaqaConfig()),
}
SLOW = {"yaqa", "quarot and gptq", "awq"}
WINDOWS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def directory(plain, tmp_path):
    plain().save_pretrained(tmp_path / "float")
    return tmp_path / "float"


@pytest.fixture
def streamed(directory, device):
    """Open a model of which one block at a time is on the device."""

    def streamed(place=device):
        model = stream_model(directory, PLENTY, device=place, attn_implementation="eager")
        residency_of(model).limit = 0
        return model

    return streamed


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in CONFIGS]
)
@pytest.mark.sampled(2)
def test_quantization(name, streamed, plain, batches, device, tmp_path):
    model = streamed()
    assert {p.device.type for p in model.parameters()} == {torch.device(device).type}
    export_safetensors(quantized(model, CONFIGS[name], batches), tmp_path / "there")
    export_safetensors(quantized(plain(), CONFIGS[name], batches), tmp_path / "here")
    if device == TYPE:
        assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_weights_are_released(streamed, plain):
    model = streamed()
    model(WINDOWS.to(model.device))
    sizes = [
        sum(p.numel() * p.itemsize for p in block.parameters()) for block in plain().model.layers
    ]
    # A block, and the largest other part: the embedding and the head are smaller.
    assert residency_of(model).peak == max(sizes)


def test_reading_ahead_costs_no_synchronisation(standin, directory):
    """The next block is read by a thread: the same values, launches and synchronisations."""
    results, counts = [], []
    for ahead in (False, True):
        model = stream_model(directory, PLENTY, device=standin, attn_implementation="eager")
        residency = residency_of(model)
        residency.limit = 3 * residency.largest
        if not ahead:
            residency._read_ahead = lambda unit: None
        with counted() as seen:
            results.append(model(WINDOWS.to(standin)).logits.cpu())
        counts.append([dict(counter) for counter in seen])
    assert torch.equal(*results)
    assert counts[0] == counts[1]


def test_perplexity(streamed, plain, device):
    expected = perplexity(plain(), WINDOWS)
    assert perplexity(streamed(), WINDOWS) == pytest.approx(
        expected, rel=0 if device == TYPE else 1e-4
    )


def test_quantized_checkpoint(plain, batches, device, tmp_path):
    expected = quantized(plain(), preset("nvfp4"), batches)
    export_safetensors(expected, tmp_path / "out")
    model = load_checkpoint(
        tmp_path / "out", max_memory=PLENTY, device=device, attn_implementation="eager"
    )
    residency_of(model).limit = 0
    ids = WINDOWS.to(device)
    for _ in range(2):  # after every part has been released once
        y = model(ids).logits.cpu()
        torch.testing.assert_close(
            y, expected(WINDOWS).logits, rtol=0, atol=0 if device == TYPE else 1e-2
        )


def test_memory_of_the_device_bounds_the_weights(standin, directory, monkeypatch):
    """A model that does not fit on the device is streamed; half of the device is for weights."""
    size = (directory / "model.safetensors").stat().st_size
    options = {"device": standin, "attn_implementation": "eager"}
    assert residency_of(load_checkpoint(directory, **options)) is None
    monkeypatch.setattr(type(torch.standin), "free", size)
    assert residency_of(load_checkpoint(directory, **options)).limit == size // 2
    assert residency_of(load_checkpoint(directory, attn_implementation="eager")) is None
