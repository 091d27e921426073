"""The page of a run."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from quark.conformance.comparison import Comparison
from quark.conformance.page import Run, by_format, read_checkpoints, render
from quark.conformance.registry import ORACLES
from quark.conformance.results import SHARED_EXPONENTS, floats, integers

DOCS = Path(__file__).parents[3] / "docs"

ROUND = Comparison("fp4", "round", 1000, 0, 3, "of 1, here 2, defined 2, theirs 1")
CODES = Comparison("fp4", "codes", 16, 1, 0, "here 3, defined 4")
ROWS = [{"client": "vllm", "layout": "awq", "scheme": "int4_wo_128", "result": "read"}]
FOREIGN = [{"writer": "mlx", "kind": "4 bits", "result": "as expected", "largest": "1e-05"}]
COUNTS = {"rounds": 1000, "refused": 700, "loaded": 299, "defect": 1}
DAMAGED = [{"door": "mlx", "seed": 0, **COUNTS, "date": "2026-11-28"}]
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
    assert "| vllm | awq | int4_wo_128 | read |  |  |  |  |" in text
    assert "Checkpoints" not in render(runs, "9.9")
    assert "other software\n\n`scripts" not in text


def test_checkpoints_of_other_software(tmp_path):
    file = tmp_path / "checkpoints.json"
    file.write_text(json.dumps(STORED | {"foreign": FOREIGN}))
    text = render([], "9.9", read_checkpoints(file))
    assert "## Checkpoints of other software" in text
    assert "| mlx | 4 bits | as expected | 1e-05 |  |  |" in text


def test_damaged_files(tmp_path):
    file = tmp_path / "checkpoints.json"
    file.write_text(json.dumps(STORED | {"damaged": DAMAGED}))
    text = render([], "9.9", read_checkpoints(file))
    assert "| mlx | 0 | 1,000 | 700 | 299 | 1 | 2026-11-28 |" in text


@pytest.mark.parametrize(
    "text",
    ["[]", '{"rows": []}', "{", json.dumps(STORED | {"rows": [{}]})]
    + [json.dumps(STORED | {"foreign": wrong}) for wrong in ([{}], {}, [3])]
    + [json.dumps(STORED | {"damaged": [{"door": "mlx"}]})],
)
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "checkpoints.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"checkpoints\.json"):
        read_checkpoints(file)


@pytest.fixture(scope="module")
def document():
    """The page of the documents."""
    return (DOCS / "conformance.md").read_text(encoding="utf-8")


def rows_of(document, title):
    """Return the cells of the rows of the first table below a title."""
    section = document.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_texts_and_checkpoints_of_the_document(document):
    """All but the two tables of numbers is what the command writes from the stored results."""
    day, version = re.search(r"wrote this page on\n(\S+), with quark (\S+)\. ", document).groups()
    expected = render([], version, read_checkpoints(DOCS / "checkpoints.json"))
    expected = re.sub(r"on\n\S+, with", f"on\n{day}, with", expected, count=1)

    def without_numbers(text):
        head, _, rest = text.partition("## Numbers\n")
        return head, rest[rest.index("## Checkpoints\n") :]

    assert without_numbers(document) == without_numbers(expected)


def test_numbers_of_the_document(document):
    rows = rows_of(document, "Numbers")
    own = [name for name, software, *_ in rows if software == "definitions"]
    assert own == [*floats(), *integers(), *SHARED_EXPONENTS]
    missing = re.search(r"Not installed where this page was made: (.*)\.", document)
    named = {software.partition(" ")[0] for _, software, *_ in rows}
    assert named | set(missing[1].split(", ") if missing else ()) == {*ORACLES}
    assert all(int(values.replace(",", "")) > 0 for _, _, values, *_ in rows)
    assert {differences for *_, differences, _ in rows} == {"0"}
    sums = Counter()
    for software, name, _, deviations, *_ in rows_of(document, "Deviations of other software"):
        sums[name, software] += int(deviations.replace(",", ""))
    assert sums == Counter({(name, by): int(n) for name, by, _, _, n in rows if int(n)})


# Words of docs/serving.md -> clients whose rows they count.
COUNTED = {
    "llama.cpp": ["llama.cpp"],
    "ModelOpt": ["modelopt"],
    "amd-quark": ["amd-quark"],
    "mlx-lm": ["mlx"],
    "gptqmodel": ["gptqmodel"],
    "Transformers": ["transformers"],
    "vLLM 0.32.0 on a CPU, in float32": ["vllm"],
    "vLLM 0.32.0 on a CPU, by its own": ["vllm as it is"],
    "lm-eval": ["lm-eval"],
    "compressed-tensors": ["compressed-tensors", "onnxruntime", "torchao"],
}


def test_rows_that_the_page_of_servers_counts():
    stored = Counter(row["client"] for row in read_checkpoints(DOCS / "checkpoints.json")["rows"])
    text = (DOCS / "serving.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| 2026[\d, -]+\|$", text, re.M)
    found = {
        words: int(count) for start in COUNTED for words, count in rows if words.startswith(start)
    }
    assert len(found) == len(rows) == len(COUNTED)
    assert sum(found.values()) == stored.total()
    for start, clients in COUNTED.items():
        count = next(n for words, n in found.items() if words.startswith(start))
        assert count == sum(stored[client] for client in clients), start
