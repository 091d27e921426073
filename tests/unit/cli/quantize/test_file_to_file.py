"""``quark quantize`` from files to files: chosen by itself, asked for, or refused."""

import json
import shutil

import pytest

from quark.cli import models


@pytest.fixture
def place(model_dir, tmp_path):
    return ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--quant_scheme", "int8_wo"]


@pytest.fixture
def unloaded(monkeypatch):
    """No model may be loaded."""

    def load_model(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load_model", load_model)


@pytest.fixture
def renamed(model_dir, tmp_path):
    """A model of an architecture that Transformers does not know."""
    path = tmp_path / "renamed"
    shutil.copytree(model_dir, path)
    described = json.loads((path / "config.json").read_text())
    described |= {"model_type": "new_kind", "architectures": ["NewForCausalLM"]}
    (path / "config.json").write_text(json.dumps(described))
    return path


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


def succeed(quark, *arguments):
    result = quark("quantize", *arguments)
    assert result.exit_code == 0, result.output + result.stderr
    return result.output


def test_it_is_chosen_where_weights_alone_decide(quark, place, tmp_path, unloaded, monkeypatch):
    said = succeed(quark, *place, "--skip_evaluation")
    assert "no model in memory" in said and "14 quantized, 1 in float" in said
    alone = files(tmp_path / "out")
    monkeypatch.undo()
    flags = ["--quant_flow", "standard", "--overwrite"]
    assert "no model in memory" not in succeed(quark, *place, "--skip_evaluation", *flags)
    assert files(tmp_path / "out") == alone


@pytest.mark.parametrize("flags", [["--quant_flow", "file2file"], ["--file2file_quantization"]])
def test_it_is_asked_for_and_the_output_is_evaluated(flags, quark, place, model_dir, monkeypatch):
    loaded, load = [], models.load_model
    monkeypatch.setattr(
        models, "load_model", lambda path, *a, **k: loaded.append(path) or load(path, *a, **k)
    )
    said = succeed(quark, *place, *flags, "--num_eval_data", "1", "--seq_len", "16")
    assert "no model in memory" in said and "perplexity" in said.split("layers")[1]
    assert loaded and model_dir not in loaded


def test_a_model_is_loaded_for_the_perplexity_of_the_original(quark, place):
    said = succeed(quark, *place, "--num_eval_data", "1", "--seq_len", "16")
    assert "no model in memory" not in said and "→" in said.split("perplexity")[-1]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--quant_scheme", "fp8"], "static activation scales are calibrated on data"),
        (["--quant_algo", "gptq", "--quant_scheme", "int4_wo_32"], "gptq runs the model"),
        (["--data_type", "float16"], "--data_type needs the model in memory"),
        (["--params_save"], "--params_save needs the model in memory"),
        (["--model_export", "quark_format"], "only hf_format is written without a model"),
    ],
)
def test_it_is_refused_where_a_model_is_needed(flags, reason, refused, place, unloaded):
    said = refused("quantize", *place, *flags, "--skip_evaluation", "--quant_flow", "file2file")
    assert "--quant_flow: " in said and reason in said


def test_flags_that_conflict(refused, place):
    said = refused("quantize", *place, "--quant_flow", "standard", "--file2file_quantization")
    assert "--quant_flow: conflicts with --file2file_quantization" in said


def test_per_block_is_noted(quark, place):
    result = quark("quantize", *place, "--skip_evaluation", "--quant_flow", "per_block")
    assert result.exit_code == 0 and "--quant_flow per_block: the whole model" in result.stderr


class TestAnArchitectureThatIsNotKnown:
    def test_it_is_quantized(self, quark, place, renamed, tmp_path):
        result = quark("quantize", *place, "--model_dir", renamed, "--skip_evaluation")
        assert result.exit_code == 0, result.output + result.stderr
        assert "Transformers does not know this architecture" in result.stderr
        described = json.loads((tmp_path / "out" / "config.json").read_text())
        assert described["model_type"] == "new_kind" and "quantization_config" in described
        assert (tmp_path / "out" / "tokenizer.json").is_file()

    def test_its_digests_are_compared(self, quark, place, renamed):
        flags = ["--model_dir", renamed, "--skip_evaluation", "--check_digests"]
        result = quark("quantize", *place, *flags)
        assert result.exit_code == 1 and "SHA256SUMS" in result.stderr

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            ([], "give --skip_evaluation"),
            (["--quant_scheme", "fp8", "--skip_evaluation"], "static activation scales"),
        ],
    )
    def test_it_is_refused(self, flags, reason, refused, place, renamed):
        said = refused("quantize", *place, "--model_dir", renamed, *flags)
        assert "Transformers does not know the architecture 'new_kind'" in said and reason in said


def test_the_first_of_several_processes_writes(quark, model_dir, tmp_path, monkeypatch):
    arguments = ["quantize", "--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    arguments += ["--quant_scheme", "int4_wo_32", "--skip_evaluation"]
    monkeypatch.setattr("quark.cli.quantize.job.rank", lambda: 1)
    assert quark(*arguments).exit_code == 0 and not any(tmp_path.iterdir())
    monkeypatch.setattr("quark.cli.quantize.job.rank", lambda: 0)
    assert quark(*arguments).exit_code == 0 and (tmp_path / "out").is_dir()
