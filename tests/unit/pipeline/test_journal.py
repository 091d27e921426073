"""Files of the journal: whole or not there, and those of one request only."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quark.torch import Journal
from quark.torch.digests import write_digests

BLOCKS = ["layers.0", "layers.1"]
REQUEST = {"data": "1f", "configuration": {"algo_config": [{"name": "gptq", "damp_percent": 0.01}]}}


@pytest.fixture
def place(tmp_path):
    return tmp_path / "out.partial"


def write(place, block="layers.0", **tensors):
    with Journal(place) as journal:
        journal.begin(REQUEST)
        return journal.begin_pass(BLOCKS).write(block, tensors, {"seen": [1, 2]})


def read(place, passes=1):
    with Journal(place) as journal:
        journal.begin(REQUEST)
        return [journal.begin_pass(BLOCKS).entries for _ in range(passes)]


def test_what_is_written_is_read(place):
    transposed = torch.randn(3, 2).T
    path = write(
        place, weight=transposed, scale=torch.ones(()), codes=torch.ones(2).bfloat16()
    ).path
    assert path.parent == place / "blocks" and path.name.startswith("0-0000-")
    assert torch.equal(load_file(path)["weight"], transposed)
    [entries] = read(place)
    assert [*entries] == ["layers.0"]
    assert entries["layers.0"].notes["seen"] == [1, 2]
    tensors = entries["layers.0"].tensors()
    assert torch.equal(tensors["weight"], transposed)
    assert tensors["weight"].stride() == transposed.stride()
    assert tensors["scale"].shape == () and tensors["codes"].dtype is torch.bfloat16


def test_a_block_without_changes_is_finished_too(place):
    write(place)
    [entries] = read(place)
    assert entries["layers.0"].tensors() == {}


def test_each_pass_has_its_own_blocks(place):
    with Journal(place) as journal:
        journal.begin(REQUEST)
        for number, block in enumerate(BLOCKS):
            files = journal.begin_pass(BLOCKS)
            files.write(block, {"x": torch.full((2,), float(number))}, {})
        assert journal.finished == 2
    first, second, third = read(place, 3)
    assert ([*first], [*second], [*third]) == (["layers.0"], ["layers.1"], [])
    assert second["layers.1"].tensors()["x"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("offset", [3, -1])
def test_a_damaged_block_is_computed_again(place, caplog, offset):
    write(place, "layers.1", x=torch.ones(3))
    path = write(place, x=torch.ones(8)).path
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    [entries] = read(place)
    assert [*entries] == ["layers.1"]
    assert "layers.0 is computed again" in caplog.text


def test_what_a_killed_process_was_writing_is_removed(place):
    path = write(place, x=torch.ones(8)).path
    for name in ("partial", ".tmp123"):
        (path.parent / name).write_bytes(b"half")
    [entries] = read(place)
    assert [*entries] == ["layers.0"] and [*path.parent.iterdir()] == [path]


def test_a_full_disk_loses_no_block(place, monkeypatch):
    path = write(place, x=torch.ones(8)).path

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=r"layers\.1 could not be written to .*No space left"):
        write(place, "layers.1", x=torch.ones(8))
    assert [*read(place)[0]] == ["layers.0"] and [*path.parent.iterdir()] == [path]


def test_no_room_is_seen_before_writing(place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match=r"has 0 B free"):
        write(place, x=torch.ones(8))


class TestAnotherRequest:
    @pytest.mark.parametrize(
        ("request_", "said"),
        [
            ({**REQUEST, "data": "2e"}, 'data was "1f" and is "2e"'),
            ({**REQUEST, "data": None}, 'data was "1f" and is null'),
            (
                {"data": "1f", "configuration": {"algo_config": [{"name": "awq"}]}},
                r'configuration.algo_config\[0\].name was "gptq" and is "awq"',
            ),
            (
                {"data": "1f", "configuration": {"algo_config": []}},
                r"configuration.algo_config was \[\{.*\}\] and is \[\]",
            ),
        ],
    )
    def test_is_refused(self, place, request_, said):
        path = write(place, x=torch.ones(8)).path
        with Journal(place) as journal, pytest.raises(ValueError, match=f"{said}.*--restart"):
            journal.begin(request_)
        assert path.is_file()

    def test_is_accepted_after_a_restart(self, place):
        write(place, x=torch.ones(8))
        with Journal(place, restart=True) as journal:
            journal.begin({**REQUEST, "data": "2e"})
            assert journal.finished == 0 and journal.begin_pass(BLOCKS).entries == {}

    def test_is_accepted_where_no_block_is_finished(self, place):
        with Journal(place) as journal:
            journal.begin({**REQUEST, "data": "2e"})
        assert read(place) == [{}]

    def test_a_damaged_request_is_refused(self, place):
        write(place, x=torch.ones(8))
        (place / "run.json").write_text("{")
        with Journal(place) as journal, pytest.raises(ValueError, match="not valid JSON"):
            journal.begin(REQUEST)


class TestOutput:
    @pytest.fixture
    def output(self, place):
        """An output that the journal knows."""
        output = place.with_name("out")
        output.mkdir()
        (output / "a.txt").write_text("a")
        write_digests(output)
        with Journal(place) as journal:
            journal.note_output(REQUEST, output)
        return output

    def test_is_known(self, place, output):
        with Journal(place) as journal:
            assert Journal.has_note(place)
            assert journal.is_of_output(REQUEST, output)
            assert not journal.is_of_output(REQUEST | {"data": "2f"}, output)
            journal.remove()
        assert not place.exists() and not Journal.has_note(place)

    @pytest.mark.parametrize("name", ["out/a.txt", "out/SHA256SUMS", "out.partial/output.json"])
    @pytest.mark.parametrize("content", [None, "", "{}"])
    def test_what_has_changed_is_not_known(self, place, output, name, content):
        file = place.parent / name
        file.unlink() if content is None else file.write_text(content)
        with Journal(place) as journal:
            assert not journal.is_of_output(REQUEST, output)


class TestDirectory:
    def test_two_processes_are_refused(self, place):
        code = f"from quark.torch import Journal; Journal({str(place)!r})"
        with Journal(place):
            with pytest.raises(FileExistsError, match="Another process works in"):
                Journal(place)
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "FileExistsError: Another process works in" in done.stderr
        Journal(place).close()

    def test_files_of_others_stay(self, place):
        place.mkdir()
        (place / "thesis.tex").write_text("years")
        with pytest.raises(FileExistsError, match="is not a journal"):
            Journal(place, restart=True)
        assert [*place.iterdir()] == [place / "thesis.tex"]

    def test_a_file_is_refused(self, place):
        place.write_text("years")
        with pytest.raises(FileExistsError, match="is not a journal"):
            Journal(place)

    def test_remove(self, place):
        write(place, x=torch.ones(8))
        with Journal(place) as journal:
            journal.remove()
        assert not place.exists()
