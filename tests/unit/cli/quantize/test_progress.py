"""A run that is killed or interrupted goes on with the same command, to the same files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quark.torch import Journal
from quark.torch.pipeline.journal import PassFiles

ROOT = Path(__file__).parents[4]


@pytest.fixture
def command(model_dir, text, tmp_path):
    """A command with an algorithm over two blocks; its output does not exist yet."""
    places = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--dataset", text]
    return ["quantize", *places, *flags, "--skip_evaluation", "--seq_len", 32]


@pytest.fixture
def interrupted(quark, command, monkeypatch, tmp_path):
    """The command, interrupted after its first block; returns what it complained."""
    write = PassFiles.write

    def stop(self, *arguments):
        write(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PassFiles, "write", stop)
        result = quark(*command)
    assert result.exit_code == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.partial"]
    return result.stderr


def killed(tmp_path, kills):
    """Run commands with kills; return how many of the runs were killed before their end."""
    arguments = [sys.executable, "-m", "tests.unit.cli.quantize.forks", tmp_path, json.dumps(kills)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=3000, cwd=ROOT)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("KILLED") == len(kills)
    return done.stdout.count("KILLED True")


@pytest.fixture
def flags_of(text, tmp_path):
    """The flags of a command for a model; the data has three chunks."""
    long, few = tmp_path / "long.txt", tmp_path / "autoround.json"
    long.write_text(text.read_text() * 10, encoding="utf-8")
    few.write_text('{"name": "autoround", "iters": 2}')

    def flags_of(model, *flags):
        data = ["--dataset", long, "--seq_len", 64, "--num_calib_data", 80, "--skip_evaluation"]
        if "autoround" in flags:
            data += ["--quant_algo_config_file", few]
        return [str(x) for x in ("quantize", "--model_dir", model, *data, *flags)]

    return flags_of


WAYS = {
    "to nearest": ("--quant_scheme", "int4_wo_32"),  # from files to files
    "static": ("--quant_scheme", "fp8", "--kv_cache_dtype", "fp8"),  # without a journal
    "awq": ("--quant_scheme", "uint4_wo_32", "--quant_algo", "awq"),
    "gptq": ("--quant_scheme", "int4_wo_32", "--quant_algo", "gptq"),
    "qronos": ("--quant_scheme", "mxfp4", "--quant_algo", "qronos"),
    "yaqa": ("--quant_scheme", "int8", "--quant_algo", "yaqa"),
    "autoround": ("--quant_scheme", "int4_wo_32", "--quant_algo", "autoround"),
    "rotation and gptq": ("--quant_scheme", "int4_wo_32", "--quant_algo", "rotation,gptq"),
}
GPTQ = WAYS["gptq"]
RANDOM = {"seconds": 1, "victim": 0}
BART = {
    **{"vocab_size": 2048, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.2},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither forks nor kill -9")
def test_another_number_of_processes_goes_on(model_dir, flags_of, tmp_path):
    command = flags_of(model_dir, *GPTQ)
    kills = [
        {"before": 2, "after": 1, "moment": {"block": 1, "victim": 1}},
        {"before": 1, "after": 2, "moment": {"block": 2, "victim": 0}},
        {"before": 1, "after": 2, "moment": {"end": True, "victim": 0}},
    ]
    assert killed(tmp_path, [kill | {"command": command} for kill in kills]) == 3


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither forks nor kill -9")
@pytest.mark.parametrize("count", [1, pytest.param(21, marks=pytest.mark.nightly)])
def test_killed_at_random_moments(model_dir, mixtral_dir, flags_of, tmp_path, count):
    commands = [
        flags_of(mixtral_dir, "--quant_scheme", "uint4_wo_32", "--quant_algo", "awq,qronos"),
        flags_of(model_dir, *GPTQ),
        flags_of(model_dir, *WAYS["yaqa"], "--max_memory", "9TB"),
    ][: count // 7 or 1]
    kills = [{"before": 1, "after": 1, "moment": RANDOM} for _ in range(count)]
    commands *= count
    killed(tmp_path, [k | {"command": c} for k, c in zip(kills, commands, strict=False)])


@pytest.fixture(scope="module")
def dirs(model_dir, mixtral_dir, tmp_path_factory):
    """Models by name, one with an encoder and a decoder."""
    from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

    path = tmp_path_factory.mktemp("models") / "bart"
    torch.manual_seed(0)
    BartForConditionalGeneration(BartConfig(**BART)).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(path)
    return {"llama": model_dir, "mixtral": mixtral_dir, "bart": path}


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="Windows has neither forks nor kill -9")
@pytest.mark.parametrize("family", ["llama", "mixtral", "bart"])
@pytest.mark.parametrize("way", WAYS)
def test_killed_with_any_number_of_processes(dirs, flags_of, tmp_path, family, way):
    if (family, way) == ("bart", "rotation and gptq"):
        pytest.skip("its residual stream cannot be rotated")
    command = flags_of(dirs[family], *WAYS[way])
    pairs = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 1), (2, 2)]
    kills = [
        {"before": pairs[i % 6][0], "after": pairs[i % 6][1], "moment": RANDOM | {"victim": i // 6}}
        for i in range(20)
    ]
    killed(tmp_path, [kill | {"command": command} for kill in kills])


def test_control_c_says_how_to_go_on(interrupted, quark, command, tmp_path):
    place = tmp_path / "out.partial"
    assert f"{place} holds 1 finished block: the same command goes on after that" in interrupted
    assert interrupted.endswith("Interrupted. No incomplete files are left.\n")
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert "going on after 1 finished block in" in result.stdout
    command[4] = tmp_path / "whole"
    assert quark(*command).exit_code == 0
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("out", "whole")]
    assert sums[0] == sums[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_killed_finish_goes_on(quark, command, monkeypatch, tmp_path, tmp_path_factory):
    at, file = command.index("--quant_algo"), tmp_path_factory.mktemp("options") / "finish.json"
    file.write_text('{"steps": 20}')
    finish = ["--finish", "distill", "--finish_config_file", file]
    command[at : at + 2] = ["--num_calib_data", 4, *finish]  # without an algorithm
    write = PassFiles.write

    def stop(self, block, *arguments):
        write(self, block, *arguments)
        if block == "10":  # steps
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PassFiles, "write", stop)
        assert quark(*command).exit_code == 130
    result = quark(*command)
    assert result.exit_code == 0 and "going on after" in result.stdout, result.output
    command[4] = tmp_path / "whole"
    assert quark(*command).exit_code == 0
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("out", "whole")]
    assert sums[0] == sums[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


@pytest.fixture
def stopped_at_the_end(request, quark, command, monkeypatch, tmp_path):
    """The command, killed when its output is in place and its journal is not removed yet."""
    command += getattr(request, "param", [])

    def keep(self):
        shutil.copytree(self.directory, tmp_path / "kept", ignore=shutil.ignore_patterns("lock"))
        remove(self)

    remove = Journal.remove
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", keep)
        assert quark(*command).exit_code == 0
    (tmp_path / "kept").rename(tmp_path / "out.partial")
    return (tmp_path / "out" / "SHA256SUMS").read_text()


@pytest.mark.parametrize(
    "stopped_at_the_end",
    [[], ["--model_export", "hf_format", "--model_export", "gguf"]],
    indirect=True,
    ids=["one format", "two formats"],
)
def test_a_run_that_is_killed_behind_its_last_step_ends_well(
    stopped_at_the_end, quark, command, tmp_path, monkeypatch
):
    monkeypatch.setattr("quark.cli.models.load_model", None)
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'out'} is complete" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == stopped_at_the_end


@pytest.mark.parametrize("what", ["flag", "data", "file", "output", "restart", "blocks alone"])
def test_an_output_that_does_not_belong_to_the_journal_is_refused(
    stopped_at_the_end, refused, command, tmp_path, what
):
    output, journal = tmp_path / "out", tmp_path / "out.partial"
    if what == "flag":
        command += ["--exclude_layers", "*down_proj"]
    if what == "restart":
        command += ["--restart"]
    if what == "data":
        text = command[command.index("--dataset") + 1]
        os.utime(text, ns=(0, text.stat().st_mtime_ns + 1))
    if what == "file":
        (output / "config.json").write_text("{}")
    if what == "output":
        shutil.rmtree(output)
        (output / "thesis").mkdir(parents=True)
    if what == "blocks alone":
        (journal / "output.json").unlink()
    before = sorted(path.name for path in output.iterdir())
    assert "exists and is not empty" in refused(*command)
    assert sorted(path.name for path in output.iterdir()) == before
    assert len(list((journal / "blocks").iterdir())) == 2


def test_an_output_that_is_not_in_place_yet_is_written_again(
    stopped_at_the_end, quark, command, tmp_path
):
    shutil.rmtree(tmp_path / "out")
    result = quark(*command)
    assert result.exit_code == 0 and "going on after 2 finished blocks in" in result.stdout
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == stopped_at_the_end
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_another_run_is_refused_before_the_original_is_evaluated(
    interrupted, refused, command, tmp_path, monkeypatch
):
    command.remove("--skip_evaluation")
    monkeypatch.setattr("quark.torch.evaluation.perplexity.window_losses", None)
    text = command[command.index("--dataset") + 1]
    said = refused(*command, "--eval_data", text, "--exclude_layers", "*down_proj", code=1)
    assert "holds the blocks of another run" in said


def test_another_flag_is_refused_until_a_restart(interrupted, quark, refused, command, tmp_path):
    said = refused(*command, "--num_calib_data", 3, code=1)
    assert "holds the blocks of another run: data was" in said and "--restart" in said
    said = refused(*command, "--exclude_layers", "*down_proj", code=1)
    assert 'configuration.exclude[0] was "lm_head" and is "*down_proj"' in said
    assert len(list((tmp_path / "out.partial" / "blocks").iterdir())) == 1
    result = quark(*command, "--num_calib_data", 3, "--restart")
    assert result.exit_code == 0 and "going on" not in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_changed_model_is_refused(quark, refused, command, model_dir, tmp_path, monkeypatch):
    command[2] = shutil.copytree(model_dir, tmp_path / "model")
    write = PassFiles.write

    def stop(self, *arguments):
        write(self, *arguments)
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PassFiles, "write", stop)
        result = quark(*command)
    assert result.exit_code == 1 and "the same command goes on" in result.stderr
    path = tmp_path / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert "another run: model." in refused(*command, code=1)


def test_two_runs_into_one_output(refused, command, tmp_path):
    with Journal(tmp_path / "out.partial"):
        said = refused(*command, code=1)
    assert "Another process works in" in said


@pytest.mark.parametrize("why", ["another run has blocks", "no room"])
def test_two_runs_of_which_one_has_no_journal(
    why, request, refused, command, tmp_path, monkeypatch
):
    """Neither begins while the other works, whatever each keeps on the disk."""
    if why == "no room":
        monkeypatch.setattr("quark.cli.quantize.progress._free", lambda path: 1000)
    else:
        request.getfixturevalue("interrupted")
        command = [flag for flag in command if flag not in ("--quant_algo", "gptq")]
    with Journal(tmp_path / "out.partial"):
        assert "Another process works in" in refused(*command, code=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "quark.cli.quantize.job.load", lambda *_, **__: Journal(tmp_path / "out.partial")
        )
        patch.setattr(
            "quark.cli.quantize.job.quantize_files", lambda *_: Journal(tmp_path / "out.partial")
        )
        assert "Another process works in" in refused(*command, code=1)
    assert not (tmp_path / "out").exists()


def test_without_room_there_is_no_journal(quark, command, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.cli.quantize.progress._free", lambda path: 1000)
    monkeypatch.setattr(Journal, "begin", None)
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert "has no room for finished blocks" in result.stderr


@pytest.mark.parametrize("flags", [[], ["--data_type", "float32"]], ids=["files", "in memory"])
def test_a_run_without_algorithms_that_is_killed_behind_its_last_step_ends_well(
    flags, quark, model_dir, monkeypatch, tmp_path
):
    places = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    command = ["quantize", *places, "--quant_scheme", "int8_wo", "--skip_evaluation", *flags]

    def keep(self):
        shutil.copytree(self.directory, tmp_path / "kept", ignore=shutil.ignore_patterns("lock"))
        remove(self)

    remove = Journal.remove
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", keep)
        assert quark(*command).exit_code == 0
    (tmp_path / "kept").rename(tmp_path / "out.partial")
    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'out'} is complete" in result.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert (tmp_path / "out" / "SHA256SUMS").read_text() == sums


def test_a_run_without_algorithms_leaves_the_blocks_of_another_run(
    interrupted, quark, command, tmp_path
):
    before = sorted(path for path in (tmp_path / "out.partial").rglob("*"))
    without = [flag for flag in command if flag not in ("--quant_algo", "gptq")]
    assert quark(*without).exit_code == 0
    assert sorted(path for path in (tmp_path / "out.partial").rglob("*")) == before
