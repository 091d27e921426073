"""Several processes give the bits of one; an error of one process is an error of all."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.quantization.same_bits import WAYS, bits_of, data, model_of

ROOT = Path(__file__).parents[3]
FEW, SEQUENCES = 9, 17  # 2 and 3 chunks
QUICK = [
    *(("llama", way) for way in ("gptq", "chosen damping", "autoround", "joint tuning")),
    *(("llama", way) for way in ("svdquant", "cached heads")),
    *(("mixtral", way) for way in ("static", "sparsegpt")),
]
ERRORS = ["other weights", "other data", "failure", "other threads", "other files"]
JOURNALS = ["unshared", "in use"]
EVERY = [
    *(("llama", way) for way in WAYS),
    *(("mixtral", way) for way in WAYS if way not in ("gptaq", "qronos")),
    *(("bart", way) for way in ("static", "awq", "gptq", "yaqa", "autoround")),
]
# Killed after a block in one number of processes, and gone on with in another.
RESUMED = {
    (2, 3): [("llama", "rotation and gptq"), ("mixtral", "gptq"), ("bart", "yaqa")],
    (3, 1): [("llama", "yaqa"), ("mixtral", "autoround"), ("bart", "static"), ("bart", "awq")],
    (1, 2): [
        *(("llama", way) for way in ("to nearest", "static", "awq", "gptq", "autoround")),
        *(("mixtral", way) for way in ("to nearest", "static", "awq", "yaqa")),
        *(("mixtral", way) for way in ("rotation and gptq",)),
        *(("bart", way) for way in ("to nearest", "gptq", "autoround")),
    ],
}
WHOLE = ("to nearest", "static")  # no algorithm has finished blocks to be killed after
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
    errors = [*(("error", way) for way in ERRORS), *(("journal", way) for way in JOURNALS)]
    expected = [bits_of(way, data(family, FEW), family) for family, way in QUICK]
    for rank in range(2):  # of the other files
        model = model_of("llama")
        model.model.layers[1].mlp.up_proj.weight.data += rank
        model.save_pretrained(tmp_path / f"model-{rank}")
    both = run(tmp_path, 2, [*errors, *QUICK], FEW)
    assert all(results[len(errors) :] == expected for results in both)
    first, second = (dict(zip([*ERRORS, *JOURNALS], results, strict=False)) for results in both)
    differences = {
        **{"other weights": "the model:", "other data": "the data:"},
        **{"other threads": "the number of threads:", "other files": "the files of the model:"},
    }
    for way, said in differences.items():
        message, is_whole = first[way]
        assert message.startswith("ValueError: Processes 0 and 1 differ in") and said in message
        assert first[way] == second[way] and is_whole
    assert first["failure"] == [
        "ProcessFailure: Process 1 of 2 failed: ZeroDivisionError: division by zero",
        True,
    ]
    assert second["failure"] == ["ZeroDivisionError: division by zero", True]
    assert second["unshared"].startswith("FileNotFoundError: Process 1 of 2 does not see ")
    assert first["unshared"] == f"ProcessFailure: Process 1 of 2 failed: {second['unshared']}"
    assert first["in use"].startswith("FileExistsError: Another process works in ")
    assert second["in use"] == f"ProcessFailure: Process 0 of 2 failed: {first['in use']}"


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "cases"), CASES.items(), ids=map(str, CASES))
def test_everything(tmp_path, count, cases):
    expected = [bits_of(way, data(family, SEQUENCES), family) for family, way in cases]
    for found in run(tmp_path, count, cases, SEQUENCES):
        pairs = zip(cases, found, expected, strict=True)
        assert [case for case, own, one in pairs if own != one] == []


def check_resumed(tmp_path, counts, cases):
    """Compare with the bits of a model in memory; batches have other sizes in each run."""
    expected = [bits_of(way, data(family, FEW), family) for family, way in cases]
    for family, way in cases:
        model_of(family).save_pretrained(tmp_path / f"{family} {way}" / "model")
    found = []
    for number, (count, blocks) in enumerate(zip(counts, (1, None), strict=True)):
        place = tmp_path / str(number)
        place.mkdir()
        asked = [(family, way, blocks, 2 + number) for family, way in cases]
        found.append(run(place, count, asked, FEW))
    for results in found[0]:
        pairs = zip(cases, expected, strict=True)
        assert results == [one if way in WHOLE else None for (_, way), one in pairs]
    for results in found[1]:
        pairs = zip(cases, results, expected, strict=True)
        assert [case for case, own, one in pairs if own != one] == []


def test_killed_and_resumed_in_parts(tmp_path):
    check_resumed(tmp_path, (2, 1), [("llama", "gptq"), ("mixtral", "awq")])


@pytest.mark.nightly
@pytest.mark.parametrize(("counts", "cases"), RESUMED.items(), ids=map(str, RESUMED))
def test_all_killed_and_resumed_in_parts(tmp_path, counts, cases):
    check_resumed(tmp_path, counts, cases)
