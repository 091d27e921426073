"""A run that is killed or interrupted goes on with the same command, to the same files."""

import os
import shutil
import subprocess
import sys

import pytest

from quark.torch import Journal
from quark.torch.pipeline.journal import PassFiles

# One process imports once and computes nothing: threads of its own would be missing in its forks.
# It runs every command in a fork, then kills and repeats it.
KILLS = """
import os, random, signal, sys, time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM

import quark.cli.quantize.command
from quark.cli.main import main

place, count, commands = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
random.seed(0)


def run(name, command, after=None):
    child = os.fork()
    if not child:
        try:
            main([*command, "--output_dir", str(place / name)])
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


expected, seconds = {}, {}
for number, command in enumerate(commands):
    start = time.monotonic()
    assert run(f"whole-{number}", command) == 0
    seconds[number] = time.monotonic() - start
    expected[number] = (place / f"whole-{number}" / "SHA256SUMS").read_text()
for kill in range(count):
    number = kill % len(commands)
    name, moment = f"killed-{kill}", random.uniform(0.1, 1) * seconds[number]
    code = run(name, commands[number], moment)
    left = sum(1 for _ in place.glob(f"{name}.partial/blocks/*"))
    assert code == 0 or run(name, commands[number]) == 0
    assert (place / name / "SHA256SUMS").read_text() == expected[number], (name, moment, left)
    print("KILLED", code, left)
assert not list(place.glob("*.partial")), list(place.iterdir())
"""


@pytest.fixture
def command(model_dir, text, tmp_path):
    """A command with an algorithm over two blocks; its output does not exist yet."""
    places = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--dataset", text]
    return ["quantize", *places, *flags, "--skip_evaluation", "--seq_len", 32]


@pytest.fixture
def interrupted(quark, command, monkeypatch, tmp_path):
    """The command, interrupted behind its first block; returns what it complained."""
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


@pytest.mark.skipif(os.name == "nt", reason="Windows has neither forks nor kill -9")
@pytest.mark.parametrize("count", [3, pytest.param(21, marks=pytest.mark.nightly)])
def test_killed_at_random_moments(model_dir, mixtral_dir, text, tmp_path, count):
    def command(model, *flags):
        data = ["--dataset", text, "--seq_len", 32, "--num_calib_data", 8, "--skip_evaluation"]
        return [str(x) for x in ("quantize", "--model_dir", model, *data, *flags)]

    commands = [
        command(mixtral_dir, "--quant_scheme", "uint4_wo_32", "--quant_algo", "awq,qronos"),
        command(model_dir, "--quant_scheme", "int4_wo_32", "--quant_algo", "gptq"),
        command(model_dir, "--quant_scheme", "int8", "--quant_algo", "yaqa", "--max_memory", "9TB"),
    ][: count // 7 or 1]
    arguments = [sys.executable, "-c", KILLS, str(tmp_path), str(count), repr(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("KILLED") == count


def test_control_c_says_how_to_go_on(interrupted, quark, command, tmp_path):
    place = tmp_path / "out.partial"
    assert f"1 finished blocks are in {place}: the same command goes on behind them" in interrupted
    assert interrupted.endswith("Interrupted. No incomplete files are left.\n")
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert "going on behind 1 finished blocks" in result.stdout
    command[4] = tmp_path / "whole"
    assert quark(*command).exit_code == 0
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("out", "whole")]
    assert sums[0] == sums[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


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


def test_without_room_there_is_no_journal(quark, command, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.cli.quantize.progress._free", lambda path: 1000)
    monkeypatch.setattr(Journal, "__init__", None)
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert "has no room for finished blocks" in result.stderr


def test_with_several_processes_there_is_no_journal(quark, command, monkeypatch):
    monkeypatch.setattr("quark.cli.quantize.progress.is_distributed", lambda: True)
    monkeypatch.setattr(Journal, "__init__", None)
    assert quark(*command).exit_code == 0
