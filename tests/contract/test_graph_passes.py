"""The examples of the document about passes run."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.graph_mode.edges import edge_quantizers

DOCUMENT = Path(__file__).parents[2] / "docs/graph-passes.md"


def test_the_example(capsys):
    code, limits = re.findall(
        r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(code, {})
    printed = capsys.readouterr().out
    assert "aten.relu.default" in printed
    assert "batch_norm" not in printed
    names: dict[str, Any] = {}
    exec(limits, names)
    data = torch.randn(4, 3, 8, 8)
    graph = torch.export.export(nn.Conv2d(3, 2, 3), (data,)).module()
    quantized = ModelQuantizer(names["config"]).quantize_model(graph, [data])
    assert all(q.scale.log2() % 1 == 0 for q in edge_quantizers(quantized).values())
