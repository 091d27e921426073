"""Options of an export."""

import pytest

from quark.torch.quantization.config.export import ExporterConfig, JsonExporterConfig


def test_documented_defaults():
    options = ExporterConfig(json_export_config=JsonExporterConfig())
    assert options.onnx_export_config is None
    assert options.json_export_config == JsonExporterConfig(
        weight_merge_groups=None,
        kv_cache_group=[],
        min_kv_scale=0.0,
        weight_format="real_quantized",
        pack_method="reorder",
    )


def test_missing_groups_are_empty():
    assert JsonExporterConfig(kv_cache_group=None).kv_cache_group == []
    assert JsonExporterConfig(kv_cache_group=("*k_proj",)).kv_cache_group == ["*k_proj"]


@pytest.mark.parametrize(
    ("field", "wrong", "near"),
    [
        ("weight_format", "real_quantised", "real_quantized"),
        ("weight_format", "fake_quant", "fake_quantized"),
        ("pack_method", "reoder", "reorder"),
    ],
)
def test_unknown_name(field, wrong, near):
    with pytest.raises(ValueError, match=f"{field}: '{wrong}' is unknown. Did you mean '{near}'"):
        JsonExporterConfig(**{field: wrong})
