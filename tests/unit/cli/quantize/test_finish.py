"""``quark quantize --finish distill``: what trains, what judges, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.pipeline.batches import split_sequences


@pytest.fixture
def steps(tmp_path):
    """Return the flags of a finish of so many steps."""

    def steps(number):
        file = tmp_path / "steps.json"
        file.write_text(json.dumps({"steps": number}))
        return ["--finish", "distill", "--finish_config_file", file]

    return steps


def test_finish(quantize, steps):
    flags = ["--quant_scheme", "int3_wo_32", "--num_calib_data", 8, "--seq_len", 32, "--json"]
    plain, _ = quantize(*flags)
    before = load_file(plain / "model.safetensors")
    path, said = quantize(*flags, "--overwrite", *steps(30))
    found = figures(said)["finish"]
    assert found["after"] < found["before"] and found["best"]
    after = load_file(path / "model.safetensors")
    changed = {
        name.rpartition(".")[2] for name in after if not torch.equal(before[name], after[name])
    }
    assert changed == {"weight_scale", "weight"}  # of layers and of norms
    assert all("norm" in n for n in after if n.endswith("weight") and before[n].ne(after[n]).any())


def test_a_finish_of_a_model_in_parts_gives_the_same_files(quantize, steps):
    """Both models are read in parts under a bound, which the plan counts."""
    flags = ["--quant_scheme", "int3_wo_32", "--num_calib_data", 8, "--seq_len", 32, "--json"]
    flags += ["--overwrite", *steps(20)]
    path, said = quantize(*flags)
    found, expected = figures(said), load_file(path / "model.safetensors")
    assert found["finish"]["best"]
    path, said = quantize(*flags, "--max_memory", "8GB")
    others = load_file(path / "model.safetensors")
    assert figures(said)["finish"] == found["finish"] and others.keys() == expected.keys()
    assert all(torch.equal(others[name], expected[name]) for name in expected)


def test_a_plan_counts_the_finish(quantize):
    flags = ["--quant_scheme", "int3_wo_32", "--num_calib_data", 8, "--seq_len", 32, "--json"]
    flags += ["--plan", "--finish", "distill"]
    whole, parts = (figures(quantize(*flags, *own)[1]) for own in ([], ["--max_memory", "8GB"]))
    steps = [{step["name"]: step for step in plan["steps"]} for plan in (whole, parts)]
    first, second = (found["distillation"] for found in steps)
    # 100 steps of four sequences; one of eight is measured before, and after every tenth step.
    # The original predicts each of the eight once.
    assert second["reads"] == 100 * 4 * 2 + 11 + 8
    assert first["passes"] == pytest.approx((100 * 4 * 3 + 11 + 8) / 8, rel=0.01)
    assert first["memory"] > second["memory"] > 0 and first["flops"] < second["flops"]


def test_options_of_a_finish(quantize, tmp_path):
    file = tmp_path / "finish.json"
    file.write_text('{"steps": 3, "interval": 1, "batch_size": 1, "kept_back": 0.5}')
    flags = ["--quant_scheme", "int3_wo_32", "--num_calib_data", 8, "--seq_len", 32, "--json"]
    flags += ["--finish", "distill", "--finish_config_file", file]
    plan = figures(quantize(*flags, "--plan")[1])
    reads = {step["name"]: step["reads"] for step in plan["steps"]}
    assert reads["distillation"] == 3 * 2 + 4 * 4 + 8  # four of eight sequences judge, four times
    assert figures(quantize(*flags)[1])["finish"]["steps"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[3]", "holds list. Give an object with some of steps, batch_size"),
        ('{"step": 3}', "holds step. Give"),
        ('{"steps": 0}', "DistillationOptions.steps must be at least 1, got 0"),
        ('{"steps": "3"}', "steps: expected an integer"),
    ],
)
def test_wrong_options_of_a_finish(text, said, refused, model_dir, tmp_path):
    file = tmp_path / "finish.json"
    file.write_text(text)
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--finish", "distill"]
    flags = ["--quant_scheme", "int8_wo", "--finish_config_file", file]
    assert said in refused("quantize", *place, *flags)


def test_a_finish_beside_a_configuration(quantize, steps, tmp_path):
    """The file of --config says nothing of a finish."""
    config = LLMTemplate.get("llama").get_config("int3_wo_32")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    flags = ["--config", tmp_path / "config.json", "--num_calib_data", 8, "--seq_len", 32]
    _, said = quantize(*flags, *steps(1), "--json")
    assert figures(said)["finish"]["steps"] == 1


def figures(said):
    """The JSON that a command has printed."""
    return json.loads(said[said.index("{") :])


def test_algorithms_do_not_see_the_text_that_judges_a_finish(quantize, steps, monkeypatch):
    seen = []
    plain = ModelQuantizer.quantize_model

    def record(self, model, batches, *rest):
        seen.extend(split_sequences(batches))
        return plain(self, model, batches, *rest)

    monkeypatch.setattr(ModelQuantizer, "quantize_model", record)
    flags = ["--quant_scheme", "int3_wo_32", "--quant_algo", "gptq", "--num_calib_data", 16]
    _, said = quantize(*flags, "--seq_len", 32, "--json", *steps(1))
    assert len(seen) == 14  # an eighth is kept back
    assert figures(said)["finish"]["steps"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num_calib_data", "1"], "one sequence trains and another one judges"),
        (["--finish_config_file", "nowhere.json"], "nowhere.json cannot be read"),
        (["--statistics", "x"], "statistics have no text"),
        (["--quant_flow", "file2file", "--skip_evaluation"], "--finish needs the model in memory"),
    ],
)
def test_a_finish_that_does_not_fit(flags, said, refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--finish", "distill"]
    assert said in refused("quantize", *place, "--quant_scheme", "int8_wo", *flags)


def test_options_without_a_finish(refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", "int8_wo", "--finish_config_file", tmp_path / "finish.json"]
    assert "Add --finish distill" in refused("quantize", *place, *flags)
