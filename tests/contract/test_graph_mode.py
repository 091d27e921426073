"""The examples of docs/graph-mode.md, in their order."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs/graph-mode.md"


def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    x = names["images"][0]
    with torch.no_grad():
        y = names["frozen"](x)
        assert torch.equal(names["loaded"](x), y)
        assert torch.equal(names["quantized"](x), y)
        error = (y - names["model"](x)).norm() / names["model"](x).norm()
    assert 0 < error < 0.05
