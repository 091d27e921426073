"""Measurements that there is no room for are refused from the headers, before any work."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from quark.cli.memory_check import Measurement, _describe
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.pipeline.memory_limit import taken_memory
from quark.torch.pipeline.requirements import require


@pytest.fixture
def verb(request):
    return getattr(request, "param", "collect")


@pytest.fixture
def verbs(model_dir, text, tmp_path, quantize, request):
    """The command lines that measure a model, and the files that they write."""
    quantized_dir = None
    if request.getfixturevalue("verb") in ("evaluate", "report"):
        quantized_dir, _ = quantize("--quant_scheme", "int8_wo")
    common = ("--seq_len", 16)
    model = ("--model_dir", model_dir, "--dataset", text, "--num_calib_data", 2, *common)
    page = ("--dataset", text, "--limit", 2, *common)
    return {
        "evaluate": (quantized_dir, "--original", model_dir, *page),
        "report": (quantized_dir, *page, "--output", tmp_path / "made.html"),
        "collect": (*model, "--output_dir", tmp_path / "made"),
        "search": (*model, "--target_bits", 4, "--output", tmp_path / "made.json"),
    }


@pytest.mark.parametrize("verb", ["evaluate", "report", "collect", "search"], indirect=True)
def test_a_bound_that_is_too_low(verb, verbs, refused, monkeypatch, tmp_path):
    monkeypatch.setattr(CheckpointReader, "tensor", None)  # no value is read
    bound = taken_memory() // 10**6
    message = refused(verb, *verbs[verb], "--max_memory", f"{bound}MB")
    assert "is too little" in message and "Give --max_memory" in message
    assert not list(tmp_path.glob("made*"))


@pytest.mark.parametrize(("limit", "counted"), [(2, 2), (40, 40), (0, 16)])
def test_the_windows_that_are_asked_for_count(limit, counted, quark, model_dir, text, monkeypatch):
    """All windows of a text count as the default."""
    seen = []
    monkeypatch.setattr("quark.cli.evaluate.check_measurement", seen.append)
    monkeypatch.setattr("quark.cli.models.load_model", None)  # ends the run
    quark("evaluate", model_dir, "--dataset", text, "--limit", limit, "--seq_len", 16)
    assert [measurement.evaluated for measurement in seen] == [counted]


@pytest.mark.parametrize("verb", ["report", "collect"], indirect=True)
def test_a_bound_that_is_given_as_the_least_is_kept(verb, verbs, quark, refused):
    message = refused(verb, *verbs[verb], "--max_memory", "1MB")
    least = message.split("Give --max_memory ")[1].split(",")[0]
    size = 2 * int(least.removesuffix("MB"))  # this process has grown meanwhile
    result = quark(verb, *verbs[verb], "--max_memory", f"{size}MB")
    assert result.exit_code == 0, result.output


def test_statistics_that_the_machine_has_no_memory_for(verbs, quark, monkeypatch, caplog):
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20, total=1 << 30)
    )
    quark("collect", *verbs["collect"])
    assert "but this machine has" in caplog.text


def test_a_disk_without_room_for_activations(verbs, refused, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr("quark.torch.pipeline.requirements.LIMIT", 0)
    place = tmp_path / "activations"
    place.mkdir()
    message = refused("collect", *verbs["collect"], "--offload_dir", place, code=1)
    assert "--offload_dir" in message and "free" in message


@pytest.mark.parametrize(
    ("changes", "name", "lower", "upper"),
    [
        # 2 pieces of 128 tokens, 2048 classes: predictions in float32 are 2 MB.
        ({"collected": 4, "probes": 2}, "sensitivities", 2_097_152, 3_000_000),
        # 32 windows at 16 positions are 4 MB.
        ({"evaluated": 32, "compared": 2}, "evaluation", 4_194_304, 4_500_000),
        ({"evaluated": 32, "kept_predictions": 512}, "evaluation", 4_194_304, 4_500_000),
        ({"evaluated": 32, "compared": 2, "samples_inputs": True}, "evaluation", 4.8e6, 5.5e6),
        ({"evaluated": 32}, "evaluation", 0, 1),
    ],
)
def test_stored_results_count(changes, name, lower, upper, model_dir):
    run = _describe(Measurement(source=model_dir, length=16, **changes))
    step = next(step for step in require(run, 0).steps if step.name == name)
    assert lower <= step.stores < upper
    spills = [
        require(changed, 0, 1 << 20).spilled[1]
        for changed in (run, run._replace(evaluation_results=()))
    ]
    assert (spills[0] > spills[1]) == ("samples_inputs" in changes)


def test_models_that_take_turns_spill_hidden_states_and_no_predictions(model_dir):
    """Predictions are 4 MB; the hidden states of each model lie in three stores."""
    asked = Measurement(source=model_dir, length=16, evaluated=32, compared=2)
    run = _describe(asked)
    in_memory, in_parts = require(run, 0), require(run, 0, 1 << 20)
    assert in_memory.spilled[1] == 0  # all fits into the default limit
    stream = 3 * 32 * 16 * run.data.hidden * run.data.itemsize
    assert in_parts.spilled[1] <= 2 * stream < run.predictions
    three = require(_describe(replace(asked, compared=3)), 0, 1 << 20)
    assert three.spilled[1] > in_parts.spilled[1]


def test_models_that_run_one_after_the_other_spill_predictions(model_dir):
    asked = Measurement(source=model_dir, length=16, evaluated=32, kept_predictions=512)
    run = _describe(asked)
    assert require(run, 0, 1 << 20).spilled[1] >= run.predictions - (1 << 19) > 1 << 20
