"""Models that compute in another way where Transformers marks them as quantized (Jamba)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quark.torch import LLMTemplate, ModelQuantizer, collect_statistics
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.graph.quantized_mark import MARK, marked
from tests.models.architectures import build, small_config

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(kind):
    return build(small_config(kind), torch.float32)


def quantize(kind, model, scheme, with_statistics=False, algorithm=None):
    config = LLMTemplate.get(kind).get_config(scheme=scheme, algorithm=algorithm)
    statistics = collect_statistics(model, [IDS]) if with_statistics else None
    data = None if with_statistics else [IDS]
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data, statistics))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["jamba", "falcon_mamba"])
@pytest.mark.parametrize(
    ("scheme", "with_statistics"), [("ptpc_int8", False), ("fp8", False), ("fp8", True)]
)
def test_every_way_to_load_gives_the_bits_of_the_model(kind, scheme, with_statistics, export):
    """Inputs of the layer that a float model does not call are quantized everywhere."""
    model = model_of(kind)
    calls = []
    layer = next(m for n, m in model.named_modules() if n.endswith("dt_proj"))
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    model(IDS)
    assert not calls  # a model of Transformers that calls it needs no mark
    handle.remove()
    model = quantize(kind, model, scheme, with_statistics)
    layer = next(m for n, m in model.named_modules() if n.endswith("dt_proj"))
    layer.register_forward_hook(lambda *_: calls.append(1))
    expected = model(IDS).logits
    assert calls
    path = export(model)
    assert MARK not in (path / "config.json").read_text()
    for load in (
        AutoModelForCausalLM.from_pretrained,
        load_checkpoint,
        lambda path: load_checkpoint(path, max_memory=1 << 40),
    ):
        assert torch.equal(load(path)(IDS).logits, expected)


def test_a_model_in_float_is_not_marked(export):
    model = model_of("jamba")
    collect_statistics(model, [IDS])
    assert not hasattr(model.config, MARK)
    path = export(quantize("jamba", model, "int8_wo"))
    assert hasattr(model.config, MARK)
    assert not hasattr(load_in_float(path).config, MARK)


def test_a_failure_takes_the_mark_away(monkeypatch):
    model = model_of("jamba")

    def fail(*args):
        assert hasattr(model.config, MARK)
        raise RuntimeError("broken")

    monkeypatch.setattr("quark.torch.quantization.api.calibrate", fail)
    with pytest.raises(RuntimeError, match="broken"):
        quantize("jamba", model, "ptpc_int8")
    assert not hasattr(model.config, MARK)


def test_a_mark_of_before_stays():
    model = model_of("jamba")
    model.config._is_quantized = True
    with marked(model):
        pass
    assert model.config._is_quantized is True
