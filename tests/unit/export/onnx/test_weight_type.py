"""Models that read the type of a weight, as vision towers do, are exported too."""

import pytest
import torch
from torch import nn

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme

pytest.importorskip("onnxruntime")


class Reader(nn.Module):
    """A layer whose input is cast to the type of its weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x):
        weight = self.layer.weight
        x = x.to(weight.device, weight.dtype)
        return self.layer(x) * weight.shape[0]


@pytest.mark.parametrize("matmul_nbits", [False, True])
@torch.no_grad()
def test_a_model_that_reads_the_type(tmp_path, run_onnx, matmul_nbits):
    config = Config(global_quant_config=scheme("int4_wo_32"))
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(Reader()))
    x = torch.randn(3, 32)
    exporter = ModelExporter(tmp_path / "x")
    exporter.export_onnx_model(model, (x,), matmul_nbits=matmul_nbits)
    [y] = run_onnx(tmp_path / "x", x)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-4)
