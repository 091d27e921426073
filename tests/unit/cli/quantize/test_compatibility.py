"""Flags of the documented script without a counterpart warn, or are refused."""

import pytest

from quark.cli.quantize.compatibility import NOTED, REFUSED

VALUES = {
    "import_file_format": ["hf_format"],
    "gpu_resident_blocks": ["2"],
    "moe_experts_second_step_config": ["w_int4_per_channel_sym"],
    "native_linear_mode": ["fp8_per_tensor"],
}


@pytest.fixture
def place(model_dir, tmp_path):
    return ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--skip_evaluation"]


@pytest.mark.parametrize("flag", NOTED)
def test_a_flag_without_effect_warns(flag, quark, place):
    flags = [f"--{flag}", *VALUES.get(flag, []), "--quant_scheme", "int8_wo"]
    result = quark("quantize", *place, *flags)
    assert result.exit_code == 0, result.output
    assert f"warning: --{flag}: {NOTED[flag]}." in result.stderr


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_is_not_supported_is_refused(flag, refused, place):
    flags = [f"--{flag}", *VALUES.get(flag, []), "--quant_scheme", "int8_wo"]
    said = refused("quantize", *place, *flags)
    assert f"--{flag}: {REFUSED[flag]}" in said


@pytest.mark.parametrize("flags", [["--quant_flow", "standard"], ["--native_linear_mode", "auto"]])
def test_a_default_value_does_not_warn(flags, quark, place):
    result = quark("quantize", *place, *flags, "--quant_scheme", "int8_wo")
    assert result.exit_code == 0, result.output
    assert "warning" not in result.stderr
