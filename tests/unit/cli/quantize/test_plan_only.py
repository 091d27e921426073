"""``--plan``: what it says of wrong patterns, and that it needs no free output."""

import pytest

PATTERNS = [
    (["--exclude_layers", "*down_porj"], "matches no module"),
    (["--layer_quant_scheme", "*nosuch", "int8_wo"], "matches no module"),
]


@pytest.mark.parametrize(("flags", "said"), PATTERNS)
def test_a_plan_warns_of_patterns_that_match_nothing(quark, model_dir, tmp_path, flags, said):
    made = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--quant_scheme", "int8"]
    result = quark("quantize", *made, *flags, "--plan")
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_a_plan_leaves_an_output_as_it_is(quark, model_dir, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    made = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--quant_scheme", "int8"]
    assert quark("quantize", *made, "--plan").exit_code == 0
    assert [file.read_text() for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert quark("quantize", *made).exit_code == 2


@pytest.mark.parametrize(
    ("flags", "written"),
    [
        (["--exclude_layers", "re:.*q_proj"], "write '*q_proj'"),
        (["--layer_quant_scheme", r"re:^model\.layers\.0.*", "int8"], "write 'model.layers.0*'"),
    ],
)
def test_regular_expressions_are_refused(refused, model_dir, flags, written):
    assert written in refused(
        "quantize", "--model_dir", model_dir, "--quant_scheme", "int8", *flags
    )


@pytest.mark.parametrize("verb", ["collect", "search"])
def test_verbs_without_a_plan_have_no_such_flag(refused, model_dir, verb):
    assert "No such option" in refused(verb, "--model_dir", model_dir, "--plan")
