"""The examples of the document about training run as they are, with fewer steps."""

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs/training.md"
EXAMPLES = re.findall(r"<!-- example -->\n```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.S)


@pytest.mark.parametrize("number", range(2))
def test_example(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(EXAMPLES) == 2
    code = EXAMPLES[number]
    shorter = code.replace("steps = 200", "steps = 4").replace("(4,)", "(1,)")
    assert shorter.count("steps = 4") == 1
    names = {}
    exec(compile(shorter, str(DOCUMENT), "exec"), names)
    assert all(m.frozen for m in names["model"].modules() if hasattr(m, "frozen"))
    if number == 1:
        assert (tmp_path / "trained-mxfp4" / "model.safetensors").is_file()
