"""The page of a run."""

import json

import pytest

from quark.conformance.comparison import Comparison
from quark.conformance.page import Run, by_format, read_checkpoints, render

ROUND = Comparison("fp4", "round", 1000, 0, 3, "of 1, here 2, defined 2, theirs 1")
CODES = Comparison("fp4", "codes", 16, 1, 0, "here 3, defined 4")
ROWS = [{"client": "vllm", "layout": "awq", "scheme": "int4_wo_128", "result": "read"}]
FOREIGN = [{"writer": "mlx", "kind": "4 bits", "result": "as expected", "largest": "1e-05"}]
STORED = {"date": "2026-11-23", "versions": {"vllm": "0.32.0"}, "rows": ROWS}


def test_sums():
    assert by_format([ROUND, CODES]) == {"fp4": (1016, 1, 3)}


def test_page(tmp_path):
    file = tmp_path / "checkpoints.json"
    file.write_text(json.dumps(STORED))
    runs = [Run("other", "1.2", [ROUND, CODES]), Run("absent", "", None)]
    text = render(runs, "9.9", read_checkpoints(file))
    assert "| fp4 | other 1.2 | 1,016 | 1 | 3 |" in text
    assert "| other 1.2 | fp4 | round | 3 | 1,000 | of 1, here 2, defined 2, theirs 1 |" in text
    assert "Not installed where this page was made: absent." in text
    assert "on 2026-11-23" in text and "Versions: vllm 0.32.0." in text
    assert "| vllm | awq | int4_wo_128 | read |  |  |  |" in text
    assert "Checkpoints" not in render(runs, "9.9")
    assert "other software\n\n`scripts" not in text


def test_checkpoints_of_other_software(tmp_path):
    file = tmp_path / "checkpoints.json"
    file.write_text(json.dumps(STORED | {"foreign": FOREIGN}))
    text = render([], "9.9", read_checkpoints(file))
    assert "## Checkpoints of other software" in text
    assert "| mlx | 4 bits | as expected | 1e-05 |  |  |" in text


@pytest.mark.parametrize(
    "text",
    ["[]", '{"rows": []}', "{", json.dumps(STORED | {"rows": [{}]})]
    + [json.dumps(STORED | {"foreign": wrong}) for wrong in ([{}], {}, [3])],
)
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "checkpoints.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"checkpoints\.json"):
        read_checkpoints(file)
