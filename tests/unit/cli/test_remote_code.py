"""Models that Python code in their directory builds."""

import json
import shutil

import pytest

CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TRUST = "--trust_remote_code"


@pytest.fixture
def remote(model_dir, tmp_path):
    """The small model under another name, with its code."""
    path = shutil.copytree(model_dir, tmp_path / "remote")
    (path / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
    (path / "modeling_own.py").write_text(MODEL, encoding="utf-8")
    config = json.loads((path / "config.json").read_text("utf-8"))
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_the_code_runs_if_it_is_trusted_alone(quark, remote, tmp_path):
    """Without trust, each verb that builds the model says so; files suffice for a scheme."""
    out, place = tmp_path / "out", ["--model_dir", remote, "--output_dir", tmp_path / "fp8"]
    made = quark("quantize", "--model_dir", remote, "--output_dir", out,
                 "--quant_scheme", "int4_wo_32", "--skip_evaluation")  # fmt: skip
    assert made.exit_code == 0, made.output
    code = " ".join(made.stdout.split())
    assert f'from_pretrained("{out}", trust_remote_code=True)' in code
    assert f"vllm serve {out} --trust-remote-code" in code
    for call, status in (
        (["evaluate", out, "--limit", 1, "--seq_len", 16], 1),
        (["inspect", remote, "--structure"], 1),
        (["convert", out, tmp_path / "other", "--to", "compressed-tensors"], 1),
        (["quantize", *place, "--quant_scheme", "fp8", "--num_calib_data", 2], 2),
    ):
        refused = quark(*call)
        assert (refused.exit_code, TRUST in refused.stderr) == (status, True), refused.stderr
        assert "pip install" not in refused.stderr
        trusted = quark(*call, TRUST)
        assert trusted.exit_code == 0, trusted.output
