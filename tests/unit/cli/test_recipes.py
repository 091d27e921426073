"""Recipes on the command line."""

import json

import pytest

from quark.torch.quantization.config.recipes import RECIPES


def test_all_are_listed(quark):
    rows = json.loads(quark("recipes", "--json").stdout)["recipes"]
    printed = quark("recipes").stdout
    assert {"w4", "w8a8", "mxfp4"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["name"] in printed
        assert row["quant_scheme"] in printed


def test_a_recipe_is_its_scheme_with_its_algorithms(quantize, tmp_path):
    data = ("--num_calib_data", 4, "--seq_len", 32)
    scheme, algorithms = RECIPES["w8a8"]
    flags = ["--quant_scheme", scheme]
    for options in algorithms:
        path = tmp_path / f"{options['name']}.json"
        path.write_text(json.dumps(options), "utf-8")
        flags += ["--quant_algo", options["name"], "--quant_algo_config_file", path]
    found, _ = quantize("--recipe", "w8a8", *data)
    expected, _ = quantize(*flags, *data)
    for name in ("model.safetensors", "config.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_groups_are_made_to_divide_the_model(quark, build, tmp_path):
    """576 hidden values take groups of 64, and 1536 in the MLP those of 128: said before work."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    build("llama", **sizes, intermediate_size=1536).save_pretrained(tmp_path / "model")
    result = quark(
        *("quantize", "--model_dir", tmp_path / "model", "--output_dir", tmp_path / "out"),
        *("--recipe", "w4", "--plan", "--json", "--skip_evaluation"),
    )
    assert result.exit_code == 0, result.output
    kinds = {kind["name"]: kind["config"] for kind in json.loads(result.stdout)["layers"]}
    assert kinds["model.layers.*.self_attn.q_proj"]["weight"]["group_size"] == 64
    assert kinds["model.layers.*.mlp.down_proj"]["weight"]["group_size"] == 128
    said = " ".join(result.stderr.split())
    assert "groups of the recipe do not divide model.layers.*" in said
    assert "the group size is 64 there" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--recipe", "w5"), "w4"),
        (("--recipe", "w4", "--quant_scheme", "fp8"), "conflicts with --recipe: give one"),
        (("--recipe", "w4", "--quant_algo", "awq"), "sets the algorithms"),
    ],
    ids=["unknown", "two ways", "algorithm"],
)
def test_wrong_calls(flags, said, quark, model_dir, tmp_path):
    result = quark("quantize", "--model_dir", model_dir, "--output_dir", tmp_path / "out", *flags)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
