"""Libraries that are slow to import are a step of their own."""

import sys

from quark.cli import models


def test_libraries_are_loaded_once_as_a_step(monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(models, "import_module", loaded.append)
    monkeypatch.delitem(sys.modules, models._LIBRARY, raising=False)
    models.load_libraries()
    assert loaded == ["transformers.modeling_utils"]
    assert "loading PyTorch and Transformers" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, models._LIBRARY, sys)
    models.load_libraries()
    assert len(loaded) == 1
