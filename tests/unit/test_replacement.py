"""Replacement of a directory: at every moment of every death, the old or the new one is whole."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from quark.torch import replacement
from quark.torch.earlier_output import DIGESTS
from quark.torch.files import check_vacant, fresh_directory

NAMES = ("config.json", "model_state_dict.pth")
CHANGES = {"open", "os.chmod", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "ctypes.dlsym"}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def write(target, content):
    with fresh_directory(target, overwrite=True) as directory:
        for name in NAMES:
            (directory / name).write_text(content)


def contents(directory):
    paths = (path for path in directory.iterdir() if path.name != DIGESTS)
    return {path.name: path.read_text() for path in paths}


def whole(content):
    return dict.fromkeys(NAMES, content)


def killed(work, step):
    """Run ``work`` in a child that dies at an event; return whether it lived to the end."""
    child = os.fork()
    if not child:
        left = step

        def count(event, arguments):
            nonlocal left
            if event in CHANGES:
                left -= 1
                if left == -1:  # the signal is an event too
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


@needs_fork
@pytest.mark.parametrize("exchanges", [True, False])
def test_a_kill_at_any_point_leaves_the_old_or_the_new(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(replacement, "_exchange", lambda first, second: False)
    target, states, missing = tmp_path / "out", [], 0
    write(target, "old")
    for step in range(400):
        finished = killed(lambda: write(target, "new"), step)
        missing += not target.exists()
        if exchanges:
            assert target.exists(), step
        check_vacant(target, overwrite=True)  # the next run recovers
        states.append(contents(target)[NAMES[0]])
        assert contents(target) == whole(states[-1]), step
        assert [path.name for path in tmp_path.iterdir() if path.name != ".out.lock"] == ["out"]
        if states[-1] == "new":
            write(target, "old")
        if finished:
            break
    check_vacant(target, overwrite=True)
    assert finished and {"old", "new"} == set(states) and len(states) > 20
    assert exchanges or missing  # a kill between the two renames was among them
    assert states == sorted(states, reverse=True)  # old until a moment, then new
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class TestLeftovers:
    def test_those_of_a_dead_process_are_removed(self, tmp_path):
        for name in (".out.partial-abcd1234", ".out.old-abcd1234"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "half").touch()
        (tmp_path / "out").mkdir()
        check_vacant(tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_an_old_directory_without_a_successor_returns(self, tmp_path):
        (tmp_path / ".out.old-abcd1234").mkdir()
        (tmp_path / ".out.old-abcd1234" / "file").touch()
        with pytest.raises(FileExistsError):
            check_vacant(tmp_path / "out")
        assert contents(tmp_path / "out") == {"file": ""}

    def test_those_of_a_living_process_stay(self, tmp_path):
        (tmp_path / ".out.partial-abcd1234").mkdir()
        code = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n print(flush=True)\n "
        lock = [sys.executable, "-c", code + "input()", str(tmp_path / ".out.lock")]
        with subprocess.Popen(lock, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
            owner.stdout.readline()
            check_vacant(tmp_path / "out")
            with pytest.raises(FileExistsError, match="Another process is writing to"):
                write(tmp_path / "out", "new")
            assert (tmp_path / ".out.partial-abcd1234").is_dir()
            owner.kill()
        check_vacant(tmp_path / "out")
        assert not (tmp_path / ".out.partial-abcd1234").exists()

    @pytest.mark.parametrize(
        "name",
        [
            ".out.partial-mine",
            ".out.partial-ABCD1234",
            "out.partial-abcd1234",
            ".o.partial-abcd123",
        ],
    )
    def test_other_names_are_not_ours(self, tmp_path, name):
        (tmp_path / name).mkdir()
        write(tmp_path / "out", "new")
        assert (tmp_path / name).is_dir()

    def test_a_link_is_not_followed(self, tmp_path):
        (tmp_path / "kept").mkdir()
        (tmp_path / ".out.partial-abcd1234").symlink_to(tmp_path / "kept")
        write(tmp_path / "out", "new")
        assert (tmp_path / "kept").is_dir()

    def test_two_writers_do_not_meet(self, tmp_path):
        with (
            fresh_directory(tmp_path / "out"),
            pytest.raises(FileExistsError, match="Another process"),
        ):
            write(tmp_path / "out", "new")
        assert contents(tmp_path / "out") == {}


class TestRefusalsBeforeTheWork:
    """A directory that could not be replaced was refused when the work was done."""

    @pytest.mark.parametrize("overwrite", [True, False])
    def test_a_mount_point(self, tmp_path, monkeypatch, overwrite):
        target = tmp_path / "out"
        target.mkdir()
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
        for write in (check_vacant, lambda *how: fresh_directory(*how).__enter__()):
            with pytest.raises(FileExistsError, match=r"out is a mount point.*a directory in it"):
                write(target, overwrite)
        check_vacant(target / "model")
        assert not list(target.iterdir())

    @pytest.mark.parametrize("refuses", ["", "out"])
    def test_directories_that_cannot_be_written(self, tmp_path, monkeypatch, refuses):
        write(tmp_path / "out", "old")
        make, make_file = tempfile.TemporaryDirectory, tempfile.TemporaryFile

        def refuse(make, dir, **options):
            if dir == tmp_path / refuses:
                raise PermissionError(13, "Permission denied")
            return make(dir=dir, **options)

        monkeypatch.setattr(tempfile, "TemporaryDirectory", partial(refuse, make))
        monkeypatch.setattr(tempfile, "TemporaryFile", partial(refuse, make_file))
        with pytest.raises(
            PermissionError, match=rf"nothing can be written to {tmp_path}/?{refuses} "
        ):
            check_vacant(tmp_path / "out", overwrite=True)
        assert contents(tmp_path / "out") == whole("old")

    def test_a_name_that_temporary_names_exceed(self, tmp_path):
        with pytest.raises(OSError, match=r"nothing can be written to .* \(File name too long\)"):
            check_vacant(tmp_path / ("x" * 250))
        write(tmp_path / ("x" * 230), "new")


def test_what_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    write(tmp_path / "out", "old")
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    write(tmp_path / "out", "new")
    (left,) = tmp_path.glob(".out.partial-*")
    assert f"{left} cannot be removed" in caplog.text and contents(left) == whole("old")
    assert contents(tmp_path / "out") == whole("new")


def test_files_are_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    events, sync, place = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), sync(handle))[1])
    monkeypatch.setattr(Path, "rename", lambda a, b: (events.append("rename"), place(a, b))[1])
    write(tmp_path / "out", "new")
    assert events == ["sync"] * 4 + [
        "rename",
        "sync",
    ]  # two files, digests, their directory, its parent


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Nothing is removed beside the target where nobody can be known to be dead."""

    def fail(self, **options):
        raise OSError("no locks")

    (tmp_path / ".out.partial-abcd1234").mkdir()
    monkeypatch.setattr(FileLock, "acquire", fail)
    check_vacant(tmp_path / "out")
    assert (tmp_path / ".out.partial-abcd1234").is_dir()
