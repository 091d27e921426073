"""A disk that is full when a file is written: an error, and the same command goes on."""

import builtins
import errno
import io
from fnmatch import fnmatch
from pathlib import Path

import pytest
import safetensors.torch
from safetensors import SafetensorError

from quark.cli import console
from quark.torch import ModelExporter, ModelQuantizer


class _Full(io.RawIOBase):
    """A file on a full disk."""

    def writable(self):
        return True

    def seekable(self):
        return True

    def seek(self, place, origin=0):
        return place

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def fill_disk(monkeypatch):
    """Let the disk be full when files of some name are written; return those that were."""

    def fill_disk(pattern):
        reached, save = [], safetensors.torch.save_file

        def opener(own):
            def open_(path, mode="r", *args, **kwargs):
                is_path = isinstance(path, (str, Path)) and mode in ("w", "r+b")
                if not is_path or not fnmatch(Path(path).name, pattern):
                    return own(path, mode, *args, **kwargs)
                reached.append(path)
                return io.TextIOWrapper(_Full(), write_through=True) if mode == "w" else _Full()

            return open_

        def save_file(tensors, path, *args, **kwargs):
            if fnmatch(Path(path).name, pattern):
                reached.append(path)
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            return save(tensors, path, *args, **kwargs)

        monkeypatch.setattr(Path, "open", opener(Path.open))
        monkeypatch.setattr(builtins, "open", opener(open))  # of Transformers
        monkeypatch.setattr(safetensors.torch, "save_file", save_file)
        return reached

    return fill_disk


@pytest.fixture
def command(model_dir, text, tmp_path):
    flags = ["--model_dir", model_dir, "--dataset", text, "--seq_len", 16, "--num_calib_data", 2]
    flags += ["--quant_scheme", "int4_wo_32", "--skip_evaluation"]
    return ["quantize", *flags, "--output_dir", tmp_path / "out"]


@pytest.fixture(scope="module")
def sums():
    """Digests of the outputs, by algorithm."""
    return {}


@pytest.mark.parametrize(
    ("algorithm", "pattern", "finished"),
    [
        ("gptq", "*run.json*", 0),  # the request of a journal
        ("gptq", "partial", 0),  # its first block
        ("gptq", "model.safetensors", 2),
        ("gptq", "config.json", 2),
        ("gptq", "SHA256SUMS", 2),
        ("gptq", "*output.json*", 2),  # what the journal notes of the output
        (None, "model.safetensors", 0),  # from files to files
        (None, "config.json", 0),
        (None, "SHA256SUMS", 0),
    ],
)
@pytest.mark.sampled(3)
def test_nothing_is_lost(
    algorithm, pattern, finished, quark, fill_disk, command, model_dir, tmp_path, sums, monkeypatch
):
    before = {path.name: path.read_bytes() for path in model_dir.iterdir()}
    command += [] if algorithm is None else ["--quant_algo", algorithm]
    reached = fill_disk(pattern)
    result = quark(*command)
    monkeypatch.undo()
    assert reached and result.exit_code == 1, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "No space left on device" in result.stderr
    assert "make room" in errors[0].lower()
    assert "out" not in [path.name for path in tmp_path.iterdir()]
    assert len(list(tmp_path.glob("out.partial/blocks/*"))) == finished
    assert before == {path.name: path.read_bytes() for path in model_dir.iterdir()}
    result = quark(*command)
    assert result.exit_code == 0, result.output
    assert ("going on after 2 finished blocks" in result.stdout) == bool(finished)
    written = (tmp_path / "out" / "SHA256SUMS").read_text()
    assert sums.setdefault(algorithm, written) == written
    assert "out.partial" not in [path.name for path in tmp_path.iterdir()]


def test_the_index(build, config_of, fill_disk, tmp_path, monkeypatch):
    model = ModelQuantizer.freeze(ModelQuantizer(config_of("int8_wo")).quantize_model(build()))
    reached = fill_disk(".model.safetensors.index.json*")
    with pytest.raises(OSError, match="No space left on device"):
        ModelExporter(None, tmp_path / "out").export_safetensors_model(model, max_shard_size="20KB")
    monkeypatch.undo()
    assert reached and list(tmp_path.iterdir()) == []
    ModelExporter(None, tmp_path / "out").export_safetensors_model(model, max_shard_size="20KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EFBIG, "File too large", "out/x"), "File too large for out/x: a limit"),
        (OSError(errno.EFBIG, "File too large"), "error: File too large: a limit"),
        (SafetensorError("I/O error: File too large (os error 27)"), "(os error 27): a limit"),
    ],
)
def test_a_limit_of_files(error, said, capsys):
    assert console.report(error) == 1
    told = capsys.readouterr().err
    assert said in told and "Raise the limit ('ulimit -f unlimited')" in told
