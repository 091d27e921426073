"""Patterns of ``--exclude_layers``."""

import json


def test_a_pattern_without_a_layer_is_warned_of_once(quantize, caplog):
    path, _ = quantize("--quant_scheme", "int8_wo", "--exclude_layers", "lm_head", "*gate_up*")
    [said] = [record.getMessage() for record in caplog.records if "gate_up" in record.getMessage()]
    assert said == "--exclude_layers: no layer matches '*gate_up*'. Nearest: gate_proj."
    config = json.loads((path / "config.json").read_text("utf-8"))
    assert config["quantization_config"]["exclude"] == ["lm_head"]
