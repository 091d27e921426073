"""Garbage collection during imports."""

import gc

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


class Request:
    """The flags that the check reads."""

    trust_remote_code = False

    def __init__(self, model_dir):
        self.model_dir = model_dir
