"""Recipes on the command line."""

import json
import shutil

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


@pytest.fixture
def odd_dir(build, model_dir, tmp_path):
    """A model of one layer with the sizes of SmolLM2-135M: 576 hidden values, 9 heads."""
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"intermediate_size": 1536, "vocab_size": 2048, "num_hidden_layers": 1}
    place = tmp_path / "model"
    build("llama", **sizes).save_pretrained(place)
    for file in model_dir.glob("tokenizer*"):
        shutil.copy(file, place)
    return place


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sampled(3)
def test_groups_are_made_to_divide_the_model(name, quark, odd_dir, tmp_path):
    """576 hidden values take groups of 64, and 1536 in the MLP those of 128: said before work."""
    result = quark(
        *("quantize", "--model_dir", odd_dir, "--output_dir", tmp_path / "out"),
        *("--recipe", name, "--plan", "--json", "--skip_evaluation"),
    )
    assert result.exit_code == 0, result.output
    kinds = {kind["name"]: kind["config"] for kind in json.loads(result.stdout)["layers"]}
    said = " ".join(result.stderr.split())
    for layer, inputs, fitting in (("self_attn.q_proj", 576, 64), ("mlp.down_proj", 1536, 128)):
        config = kinds[f"model.layers.*.{layer}"]
        stages = [config[t] for t in ("weight", "input_tensors") if config.get(t)]
        specs = [spec for x in stages for spec in (x if isinstance(x, list) else [x])]
        sizes = {size for spec in specs if (size := spec.get("group_size"))}
        assert sizes <= {16, 32, fitting} and all(inputs % size == 0 for size in sizes)
    are_in_128 = name in ("w4", "w3", "w2", "w4a4", "w4a4_rotated")
    assert ("groups of the recipe do not divide model.layers.*" in said) is are_in_128
    assert ("the group size is 64 there" in said) is are_in_128


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_works_on_such_a_model(name, quark, odd_dir, tmp_path):
    result = quark(
        *("quantize", "--model_dir", odd_dir, "--output_dir", tmp_path / "out", "--recipe", name),
        *("--num_calib_data", 4, "--seq_len", 32, "--skip_evaluation", "--verify"),
    )
    assert result.exit_code == 0, result.output


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
