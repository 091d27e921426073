"""Garbage collection during imports."""

import gc
import subprocess
import sys

import pytest

from quark.cli.imports import collection_paused
from quark.cli.models import check_model
from quark.cli.quantize.file_job import is_known_architecture
from quark.torch.export import recognition
from quark.torch.export.checkpoint import stored_model


def test_pause_ends_after_an_error_too():
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(OSError, match="missing"), collection_paused():
        raise OSError("missing")
    assert gc.isenabled()


def test_collection_that_was_off_stays_off():
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_transformers_is_imported_in_a_pause(monkeypatch, tmp_path):
    states = []

    def record(*_):
        states.append(gc.isenabled())
        return True

    monkeypatch.setattr(recognition, "check_checkpoint", record)
    monkeypatch.setattr(stored_model, "is_known", record)
    (tmp_path / "model.safetensors").touch()
    check_model(tmp_path)
    assert is_known_architecture(Request(tmp_path), {})
    assert states == [False, False]
    assert gc.isenabled()


def test_modules_are_not_collected_at_the_end_of_the_process():
    """A cycle of a module stays as it is: nothing calls its finalizer."""
    code = (
        "import gc, sys; gc.disable(); from quark.cli.main import main\n"
        "class Cycle:\n"
        "    def __del__(self):\n"
        "        sys.__stdout__.write('collected')\n"
        "cycle = Cycle(); cycle.own = cycle; del cycle\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quark ")
    assert "collected" not in done.stdout


class Request:
    """The flags that the check reads."""

    trust_remote_code = False

    def __init__(self, model_dir):
        self.model_dir = model_dir
