"""Ctrl-C while an ONNX file is written."""

import pytest
import torch
from torch import nn

from quark.torch import ModelExporter
from tests import configurations

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


def test_an_interrupted_write_leaves_the_earlier_file(quantize, tmp_path, monkeypatch):
    ir, partial = pytest.importorskip("onnx_ir"), []
    model = quantize(nn.Sequential(nn.Linear(32, 8)), configurations.preset("int8_wo"), None)
    exporter = ModelExporter(tmp_path / "out", overwrite=True)
    exporter.export_onnx_model(model, torch.zeros(1, 32))
    before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}

    def save(_, path, **__):
        path.write_bytes(b"half")
        partial.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(ir, "save", save)
    with pytest.raises(KeyboardInterrupt):
        exporter.export_onnx_model(model, torch.zeros(1, 32))
    assert partial
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
