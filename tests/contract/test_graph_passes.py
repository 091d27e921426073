"""The example of the document about passes runs."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs/graph-passes.md"


def test_the_example(capsys):
    [code] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "aten.relu.default" in printed
    assert "batch_norm" not in printed
