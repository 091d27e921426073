"""Several processes give the bits of one; an error of one process is an error of all."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.quantization.same_bits import WAYS, bits_of, data

ROOT = Path(__file__).parents[3]
FEW, SEQUENCES = 9, 17  # 2 and 3 chunks
QUICK = [("llama", "gptq"), ("mixtral", "static"), ("llama", "autoround")]
ERRORS = ["other weights", "other data", "failure"]
EVERY = [
    *(("llama", way) for way in WAYS),
    *(("mixtral", way) for way in WAYS if way not in ("gptaq", "qronos")),
    *(("bart", way) for way in ("static", "awq", "gptq", "yaqa", "autoround")),
]
CASES = {2: EVERY, 3: EVERY, 9: QUICK}  # 9 are more than there are chunks or leaves


def run(tmp_path, count, cases, sequences):
    """Return what each process prints for each case."""
    command = [sys.executable, "-m", "tests.unit.quantization.same_bits", str(tmp_path / "store")]
    places = [tmp_path / f"{rank}.jsonl" for rank in range(count)]
    errors = tmp_path / "errors.txt"
    with ExitStack() as stack:  # files: a process that nobody reads from would wait for ever
        said = stack.enter_context(errors.open("w"))
        workers = [
            subprocess.Popen(
                [*command, str(rank), str(count), json.dumps(cases), str(sequences)],
                cwd=ROOT,
                stdout=stack.enter_context(place.open("w")),
                stderr=said,
            )
            for rank, place in enumerate(places)
        ]
        codes = [worker.wait() for worker in workers]
    assert codes == [0] * count, errors.read_text()
    return [[json.loads(line) for line in place.open()] for place in places]


def test_two_processes(tmp_path):
    errors = [("error", way) for way in ERRORS]
    expected = [bits_of(way, data(family, FEW), family) for family, way in QUICK]
    first, second = run(tmp_path, 2, [*errors, *QUICK], FEW)
    (weights, order, failure), (weights_2, order_2, failure_2) = first[:3], second[:3]
    assert weights == weights_2 and weights[0].startswith("ValueError: Processes 0 and 1 differ in")
    assert "the model:" in weights[0] and "the data:" in order[0] and order == order_2
    assert failure == [
        "ProcessFailure: Process 1 of 2 failed: ZeroDivisionError: division by zero",
        True,
    ]
    assert failure_2 == ["ZeroDivisionError: division by zero", True]
    assert first[3:] == second[3:] == expected


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "cases"), CASES.items(), ids=map(str, CASES))
def test_everything(tmp_path, count, cases):
    expected = [bits_of(way, data(family, SEQUENCES), family) for family, way in cases]
    for found in run(tmp_path, count, cases, SEQUENCES):
        pairs = zip(cases, found, expected, strict=True)
        assert [case for case, own, one in pairs if own != one] == []
