"""``--plan``: what it says of wrong patterns, and that it needs no free output."""

import pytest

SIZES = ["--group_size_per_layer", "*_proj", 16]
PATTERNS = [
    (["--layer_quant_scheme", "*nosuch", "int8_wo"], "no layer matches '*nosuch'. Layers: "),
    (["--layer_quant_scheme", "*down_porj", "int8_wo"], "Nearest: down_proj"),
    (["--layer_quant_scheme", "*mlp", "int8_wo"], "no layer matches '*mlp'"),
    (["--group_size_per_layer", "*nosuch", 16], "no layer matches '*nosuch'"),
    (["--layer_quant_scheme", "lm_head", "int8_wo"], "these layers stay in float by default"),
    (
        ["--exclude_layers", "*v_proj", "--layer_quant_scheme", "*.v_proj", "int8_wo"],
        "--exclude_layers keeps these layers in float",
    ),
    (
        ["--layer_quant_scheme", "*_proj", "int8_wo", "*v_proj", "fp8_wo"],
        "'*v_proj' has no effect: '*_proj' comes before",
    ),
    ([*SIZES, "--layer_quant_scheme", "*_proj", "int8_wo"], "'*_proj' has no effect"),
]


def plan(model_dir, place):
    made = [
        "--model_dir",
        model_dir,
        "--output_dir",
        place,
        "--quant_scheme",
        "w_int4_per_group_sym",
    ]
    return ["quantize", *made, "--group_size", 32, "--plan"]


@pytest.mark.parametrize(("flags", "said"), PATTERNS)
def test_patterns_that_decide_nothing_are_refused(refused, model_dir, tmp_path, flags, said):
    assert said in refused(*plan(model_dir, tmp_path / "out"), *flags)


@pytest.mark.parametrize(
    "flags",
    [
        SIZES,
        ["--layer_quant_scheme", "*.0.*", "int8_wo", "*v_proj", "fp8_wo"],  # of layer 1
        ["--exclude_layers", "--layer_quant_scheme", "lm_head", "int8_wo"],
    ],
)
def test_patterns_that_decide_about_a_layer(quark, model_dir, tmp_path, flags):
    result = quark(*plan(model_dir, tmp_path / "out"), *flags)
    assert result.exit_code == 0, result.output


def test_single_experts_are_layers(quark, mixtral_dir, tmp_path):
    flags = ["--layer_quant_scheme", "*experts.*.w2", "int8_wo"]
    result = quark(*plan(mixtral_dir, tmp_path / "out"), *flags)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["lm_haed"], "'lm_haed'. Nearest: lm_head. Without this flag, lm_head and the parts"),
        (["lm_head", "down_porj"], "no layer matches 'down_porj'. Nearest: down_proj"),
        (["*down_porj"], "no layer matches '*down_porj'. Nearest: down_proj"),
        (
            ["lm_head", "*.0.mlp"],
            "such as 'model.layers.0.mlp.gate_proj', and no layer. Write '*.0",
        ),
    ],
)
def test_exclusions_that_match_no_layer_are_refused(refused, model_dir, tmp_path, patterns, said):
    command = [*plan(model_dir, tmp_path / "out"), "--exclude_layers", *patterns]
    assert said in refused(*command)
    assert not (tmp_path / "out").exists()


def test_lists_for_several_architectures_are_warned_of(quark, model_dir, tmp_path):
    patterns = ["*shared_expert", "lm_head", "*router"]
    result = quark(*plan(model_dir, tmp_path / "out"), "--exclude_layers", *patterns)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "no layer matches '*shared_expert'" in said and "no layer matches '*router'" in said


LOST = "so the output head (lm_head) is quantized. Add it to the list to keep it in float."


@pytest.mark.parametrize(
    ("patterns", "is_lost"),
    [
        (["*.0.*"], True),
        (["*.0.*", "lm_head"], False),
        (["*.0.*", "lm_h*", "*norm"], False),
        ([""], False),  # all layers, as it says
        (["*.0.*", "--layer_quant_scheme", "lm_head", "int8_wo"], False),
    ],
)
def test_a_list_without_the_output_head(quark, model_dir, tmp_path, patterns, is_lost):
    result = quark(*plan(model_dir, tmp_path / "out"), "--exclude_layers", *patterns)
    assert result.exit_code == 0, result.output
    assert (LOST in " ".join(result.output.split())) == is_lost


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
