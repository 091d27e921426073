"""Layers that keep the codes of a quantized source: what is said before and after the work."""

import logging

import pytest

from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.plan import prepare


@pytest.fixture
def source(build, quantize, export):
    """A directory in fp8."""
    return export(quantize(build(), "fp8"))


@pytest.mark.parametrize("keeps", [True, False])
def test_formats_that_cannot_hold_them_are_named_before_the_work(
    keeps, source, config_of, tmp_path, caplog, monkeypatch
):
    model = import_model_from_safetensors(None, source, dequantize=True)
    exclude = ["lm_head", "*down_proj"]
    config = config_of("uint4_wo_32", exclude=exclude, keep_prequantized_layers=keeps)
    said = []
    monkeypatch.setattr(
        "quark.torch.quantization.api.prepare",
        lambda *args: (said.extend(caplog.messages), prepare(*args)),
    )
    with caplog.at_level(logging.INFO, logger="quark"):
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    before = [message for message in said if "custom_mode='quark' alone holds" in message]
    assert len(before) == keeps
    if not keeps:
        export_safetensors(model, tmp_path / "out", custom_mode="awq")
        return
    assert before[0].startswith("2 layers that stay in float, such as model.layers.0.mlp.down_proj")
    assert "Config(keep_prequantized_layers=False)" in before[0]
    with pytest.raises(ValueError, match=r"Config\(keep_prequantized_layers=False\)"):
        export_safetensors(model, tmp_path / "out", custom_mode="awq")
    assert not (tmp_path / "out").exists()
