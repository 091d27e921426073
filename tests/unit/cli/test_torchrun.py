"""``torchrun -m quark quantize``: the files of one process, and one message if a process fails."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
import typer

from quark import __version__
from quark.cli import process_group
from quark.torch import Journal
from quark.torch.pipeline.journal import PassFiles

FLAGS = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--skip_evaluation"]


def python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def torchrun(count, *arguments):
    runner = ["-m", "torch.distributed.run", "--nproc_per_node", count, "--standalone"]
    return python(*runner, "-m", "quark", "quantize", *arguments)


def test_the_package_is_a_program():
    result = python("-m", "quark", "--version")
    assert result.returncode == 0 and result.stdout.strip() == f"quark {__version__}"


def test_other_verbs_run_in_one_process(quark, monkeypatch):
    monkeypatch.setattr(process_group, "PAUSE", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = quark("schemes")
    assert result.exit_code == 2 and "'quark schemes' runs in one process" in result.stderr
    monkeypatch.setenv("RANK", "1")
    result = quark("schemes")
    assert result.exit_code == 1 and result.stderr == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert quark("schemes").exit_code == 0


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [("cuda:1", 4, "a device of its own"), ("cuda", 2, "this machine has 2 devices of type cuda")],
)
def test_each_process_takes_a_device(monkeypatch, device, count, message):
    class Module:
        chosen = None

        def device_count(self):
            return count

        def set_device(self, number):
            self.chosen = number

    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(typer.BadParameter, match=message):
        process_group._choose_accelerator(torch.device(device))
    monkeypatch.setenv("LOCAL_RANK", "1")
    process_group._choose_accelerator(torch.device("cuda"))
    assert module.chosen == 1


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 3])
def test_files_are_those_of_one_process(quantize, mixtral_dir, text, tmp_path, count):
    expected, _ = quantize(*FLAGS, "--seq_len", 64, model=mixtral_dir)
    arguments = ["--model_dir", mixtral_dir, "--dataset", text, "--seq_len", 64, *FLAGS]
    output = tmp_path / "several"
    result = torchrun(count, *arguments, "--output_dir", output)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Load it:") == 1  # the first process alone speaks
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in output.iterdir())
    assert all((output / n).read_bytes() == (expected / n).read_bytes() for n in names)


@pytest.mark.nightly
def test_one_message(tmp_path):
    result = torchrun(2, "--model_dir", tmp_path, "--output_dir", tmp_path / "out", *FLAGS)
    assert result.returncode == 1
    assert result.stderr.count("error: ") == 1 and not (tmp_path / "out").exists()


ENDING = """
import os, signal, sys
from quark.torch.quantization import api
own = api.prepare
def prepare(*args):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    own(*args)
api.prepare = prepare
from quark.cli.main import main
main()
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_process_that_is_killed_ends_all(mixtral_dir, text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    runner = ["-m", "torch.distributed.run", "--nproc_per_node", 2, "--standalone", script]
    data = ["--model_dir", mixtral_dir, "--dataset", text, "--seq_len", 64]
    result = python(*runner, "quantize", *data, "--output_dir", tmp_path / "out", *FLAGS)
    assert result.returncode == 1 and "SIGKILL" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]


@pytest.mark.nightly
def test_going_on_with_two_processes(quark, model_dir, text, tmp_path, monkeypatch):
    model = shutil.copytree(model_dir, tmp_path / "model")
    arguments = ["--model_dir", model, "--dataset", text, "--seq_len", 64, *FLAGS]
    assert quark("quantize", *arguments, "--output_dir", tmp_path / "whole").exit_code == 0
    arguments += ["--output_dir", tmp_path / "out"]
    write = PassFiles.write

    def stop(self, *arguments):
        write(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PassFiles, "write", stop)
        assert quark("quantize", *arguments).exit_code == 130

    def refused(*flags):
        result = torchrun(2, *arguments, *flags)
        assert result.returncode == 1 and result.stderr.count("error: ") == 1, result.stderr
        assert len(list((tmp_path / "out.partial" / "blocks").iterdir())) == 1
        return " ".join(result.stderr.split())

    path = model / "model.safetensors"
    data, times = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "holds the blocks of another run: model." in refused()
    path.write_bytes(data[:1000])
    assert "is damaged" in refused()
    path.unlink()
    assert "no file named model.safetensors" in refused()
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with Journal(tmp_path / "out.partial"):
        assert "Another process works in" in refused()
    result = torchrun(2, *arguments)
    assert result.returncode == 0, result.stderr
    assert "going on after 1 finished block in" in result.stdout
    sums = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("out", "whole")]
    assert sums[0] == sums[1] and not (tmp_path / "out.partial").exists()
