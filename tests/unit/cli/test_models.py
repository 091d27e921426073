"""Libraries that are slow to import are a step of their own."""

import sys
from types import SimpleNamespace

import pytest

from quark.cli import models


@pytest.mark.parametrize("is_loaded", [False, True])
def test_libraries_are_loaded_once_as_a_step(is_loaded, monkeypatch, capsys):
    loaded = {"transformers.modeling_utils": sys} if is_loaded else {}
    monkeypatch.setattr(models, "sys", SimpleNamespace(modules=loaded))
    models.load_libraries()
    assert ("loading PyTorch and Transformers" in capsys.readouterr().err) is not is_loaded
    assert "transformers.modeling_utils" in sys.modules
