"""Options of algorithms in messages of the command line."""

import re
import shutil

import pytest

from quark.cli.option_words import in_json

GIVEN = "The options of rotation are in a JSON file: --quant_algo_config_file rotation FILE."


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("rotation: no. Set r1=False.", f'rotation: no. Set "r1": false. {GIVEN}'),
        ("rotation: trainable=True needs x.", f'rotation: "trainable": true needs x. {GIVEN}'),
        ("rotation: set use_cache=False.", None),  # no option of it
        ("rotation: no rotation is selected.", None),
        ("model: Set r1=False.", None),
    ],
)
def test_messages(message, said):
    assert in_json(message) == (said or message)


def test_a_recipe_is_replaced_by_its_scheme_and_algorithms(quark, bert_dir, model_dir, tmp_path):
    """The advice is followed, word by word."""
    place = shutil.copytree(bert_dir, tmp_path / "bert")
    for part in model_dir.glob("tokenizer*"):
        shutil.copy(part, place)
    given = ["quantize", "--model_dir", place, "--output_dir", tmp_path / "out"]
    given += ["--skip_evaluation", "--num_calib_data", 2, "--seq_len", 16]
    result = quark(*given, "--recipe", "w8a8_rotated")
    assert result.exit_code == 2, result.output
    advice = re.search(r"In place of --recipe, give (--.*) FILE, with", result.stderr)[1]
    file = tmp_path / "options.json"
    file.write_text('{"r1": false, "r2": true, "r4": true}', encoding="utf-8")
    result = quark(*given, *advice.split(), file)
    assert result.exit_code == 0, result.output


def test_a_model_that_cannot_be_rotated(quark, bert_dir, tmp_path):
    options = tmp_path / "options.json"
    options.write_text('{"r1": true}', encoding="utf-8")
    given = ["--model_dir", bert_dir, "--output_dir", tmp_path / "out", "--skip_evaluation"]
    given += ["--quant_scheme", "int8_wo", "--quant_algo", "rotation"]
    result = quark("quantize", *given, "--quant_algo_config_file", "rotation", options)
    assert result.exit_code == 2, result.output  # give another call
    assert 'Set "r1": false to apply' in result.stderr
    assert "r1=" not in result.stderr
    assert "--quant_algo_config_file rotation FILE" in result.stderr
