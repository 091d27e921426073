"""Temporary directories: removed at the end, or after a kill by the next, never while in use."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from quark.torch.pipeline.temporary_directory import LOCK, TemporaryDirectory, sweep

PREFIX = "quark-test-"
CHILD = f"""
import sys
from pathlib import Path
from quark.torch.pipeline.temporary_directory import TemporaryDirectory
directory = TemporaryDirectory({PREFIX!r}, Path(sys.argv[1]))
(directory.path / "values").write_bytes(b"1")
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(tmp_path):
    """A process with a temporary directory; its path."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def names(place):
    return sorted(path.name for path in place.iterdir())


def test_directory_of_a_killed_process_is_removed_by_the_next(child, tmp_path):
    process, path = child
    process.kill()
    process.wait()
    assert (path / "values").is_file()
    own = TemporaryDirectory(PREFIX, tmp_path)
    assert names(tmp_path) == [own.path.name]


def test_directory_of_a_living_process_stays(child, tmp_path):
    process, path = child
    own = TemporaryDirectory(PREFIX, tmp_path)
    assert (path / "values").read_bytes() == b"1"
    assert own.path.is_dir()
    process.communicate("")  # it ends
    assert process.returncode == 0
    assert not path.exists()


def test_own_directory_stays_while_it_is_in_use(tmp_path):
    first, second = (TemporaryDirectory(PREFIX, tmp_path) for _ in range(2))
    assert first.path != second.path
    assert first.path.is_dir()


def test_directory_ends_with_its_object(tmp_path):
    first, second = (TemporaryDirectory(PREFIX, tmp_path) for _ in range(2))
    (first.path / "inside").mkdir()
    first.cleanup()
    assert names(tmp_path) == [second.path.name]
    del second
    gc.collect()
    assert names(tmp_path) == []


def test_what_others_made_stays(tmp_path):
    (tmp_path / f"{PREFIX}unlocked").mkdir()  # in use perhaps, where the disk has no locks
    (tmp_path / "quark-other").mkdir()
    (tmp_path / "quark-other" / LOCK).touch()
    (tmp_path / f"{PREFIX}file").touch()
    before = names(tmp_path)
    sweep(tmp_path, PREFIX)
    assert names(tmp_path) == before


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets few users make links")
def test_links_are_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / LOCK).write_text("text")
    (tmp_path / f"{PREFIX}link").symlink_to(kept)
    sweep(tmp_path, PREFIX)
    assert (kept / LOCK).read_text() == "text"


def test_directory_that_was_swept_before_its_lock_is_made_again(tmp_path, monkeypatch):
    from quark.torch.pipeline import temporary_directory

    make, made = temporary_directory.tempfile.mkdtemp, []

    def swept_once(**given):
        made.append(make(**given))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(temporary_directory.tempfile, "mkdtemp", swept_once)
    own = TemporaryDirectory(PREFIX, tmp_path)
    assert names(tmp_path) == [own.path.name]
    assert names(own.path) == [LOCK]
    if sys.platform != "win32":
        assert own.path.stat().st_mode & 0o777 == 0o700
    TemporaryDirectory(PREFIX, tmp_path)
    assert own.path.is_dir()
