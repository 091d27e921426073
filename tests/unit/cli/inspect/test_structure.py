"""``quark inspect --structure``: what is found in a model that is loaded for it."""

import json

from quark.cli.inspect.structure import as_dict, find_structure


def test_groups_and_stream(quark, model_dir):
    result = quark("inspect", model_dir, "--structure", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["blocks"] == ["model.layers.0", "model.layers.1"]
    assert [group["producer"] for group in found["groups"]][:2] == [
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.v_proj",
    ]
    assert found["groups"][-1] == {
        "kind": "norm",
        "producer": "model.norm",
        "consumers": ["lm_head"],
        "block": "",
        "size": 32,
        "unreached": [],
    }
    assert all(rejected["reason"] for rejected in found["rejected"])
    assert (found["stream"]["size"], found["stream"]["readers"]) == (32, 11)
    assert found["obstacle"] == ""


def test_tables(quark, model_dir):
    result = quark("inspect", model_dir, "--structure")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["model.layers.*.self_attn.v_proj", "o_proj", "32", "2"] in lines
    assert "goes through silu in" in result.stdout
    assert "can be rotated" in result.stdout


def test_what_stands_in_the_way_of_rotations(quark, bert_dir):
    result = quark("inspect", bert_dir, "--structure")
    assert result.exit_code == 0, result.output
    assert "cannot be rotated: the stream is added to the output of" in " ".join(
        result.stdout.split()
    )


def test_a_quantized_model_has_the_structure_of_the_float_model(quark, quantize, model_dir):
    path, _ = quantize("--quant_scheme", "int8_wo")
    expected = quark("inspect", model_dir, "--structure", "--json").stdout
    assert quark("inspect", path, "--structure", "--json").stdout == expected


def test_printed_structure_is_the_one_that_is_found(quark, model_dir):
    result = quark("inspect", model_dir, "--structure", "--json")
    assert json.loads(result.stdout) == json.loads(json.dumps(as_dict(find_structure(model_dir))))
