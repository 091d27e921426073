"""``--device`` of the command line."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from quark.cli import accelerators
from quark.cli import process_group as process_groups
from quark.cli.main import app
from quark.cli.process_group import process_group
from quark.demo.text import model_directory
from tests.device.stand_in import COUNT, TYPE, counted
from tests.device.test_checkpoints import contents


def test_names_of_devices(standin):
    assert accelerators.pick_device("auto") == TYPE
    assert accelerators.pick_device(f"{TYPE}:1") == f"{TYPE}:1"
    assert accelerators.pick_device("cpu") == "cpu"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{TYPE}:{COUNT}", f"Give {TYPE}:0 to {TYPE}:{COUNT - 1}"),
        ("meta", "no device of torch"),
        ("gpu", "no device of torch"),
    ],
)
def test_devices_that_are_not_there(name, message, standin):
    with pytest.raises(typer.BadParameter, match=message):
        accelerators.pick_device(name)


def test_an_accelerator_without_float64(standin, monkeypatch):
    zeros = torch.zeros

    def refuse(*args, dtype=None, **kwargs):
        if dtype is torch.float64:
            raise TypeError("the type float64 is not supported")
        return zeros(*args, dtype=dtype, **kwargs)

    monkeypatch.setattr(torch, "zeros", refuse)
    assert accelerators.pick_device("auto") == "cpu"
    assert accelerators.pick_device(TYPE) == TYPE


@pytest.fixture(scope="module")
def model_dir(build, tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("float")
    build(vocab_size=2048, hidden_size=32, intermediate_size=32).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(directory)
    return directory


@pytest.fixture
def quantize(model_dir):
    """Run ``quark quantize`` with few data, and return what it prints."""

    def quantize(device, *flags):
        common = ["--model_attn_implementation", "eager", "--num_calib_data", "4"]
        common += ["--seq_len", "16", "--skip_evaluation", "--model_dir", model_dir]
        arguments = ["quantize", *common, "--device", device, *flags]
        result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return quantize


def test_files_are_those_of_the_cpu(standin, quantize, tmp_path):
    for device in ("cpu", TYPE):
        flags = ["--quant_scheme", "fp8", "--kv_cache_dtype", "fp8"]
        quantize(device, *flags, "--output_dir", tmp_path / device)
    assert contents(tmp_path / "cpu") == contents(tmp_path / TYPE)


@pytest.mark.parametrize(
    "memory", [pytest.param((), marks=pytest.mark.nightly), ("--max_memory", "64GB")]
)
def test_files_are_those_of_one_device(standin, quantize, tmp_path, memory):
    for device in (f"{TYPE}:0", f"{TYPE}:0,{TYPE}:1"):
        flags = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", *memory]
        with counted() as counts:
            quantize(device, *flags, "--output_dir", tmp_path / device)
        assert len(counts.by_device()) == device.count(TYPE)
    first, second = tmp_path.iterdir()
    assert contents(first) == contents(second)


def test_files_to_files_take_turns(standin, quantize, tmp_path):
    with counted() as counts:
        quantize("all", "--quant_scheme", "int8", "--output_dir", tmp_path / "out")
    assert {place for place, (launches, _) in counts.by_device().items() if launches} == {0, 1, 2}


def test_the_plan_of_several_devices(standin, quantize):
    """Each device has its own weights and its own changed values; the samples are shared."""
    flags = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--plan"]
    text = quantize("all", *flags)
    assert f"on each of {COUNT}, which share the samples" in text
    assert "sent by each GPU to others" in text
    one, several = (
        json.loads(quantize(device, *flags, "--json", "--max_memory", "64GB"))
        for device in (TYPE, "all")
    )
    assert (one["devices"], several["devices"]) == (1, COUNT)
    assert several["device_memory"] == one["device_memory"] > 0
    assert several["read"] == COUNT * one["read"]
    assert several["network"] > one["network"] == 0


class TestSeveralNames:
    """What ``--device`` takes for several devices."""

    def test_all(self, standin, monkeypatch):
        every = [f"{TYPE}:{number}" for number in range(COUNT)]
        assert accelerators.pick_devices("all") == every
        assert accelerators.pick_devices(", ".join(every[:2])) == every[:2]
        assert accelerators.pick_devices("auto") == [TYPE]
        monkeypatch.setattr(type(torch.standin), "device_count", lambda self: 1)
        assert accelerators.pick_devices("all") == [TYPE]

    def test_no_accelerator(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        with pytest.raises(typer.BadParameter, match="no GPU that torch can use"):
            accelerators.pick_devices("all")

    @pytest.mark.parametrize(
        "names", ["{0}:0,{0}:0", "{0},{0}:1", "{0}:0,cpu", "cpu,cpu", "{0}:0,{0}:9", "{0}:0,"]
    )
    def test_refused(self, standin, names):
        with pytest.raises(typer.BadParameter, match=r"share the work|there is no|no device"):
            accelerators.pick_devices(names.format(TYPE))

    @pytest.mark.parametrize("names", ["{0}:0,{0}:1", "all"])
    def test_verbs_of_one_device(self, standin, names):
        with pytest.raises(typer.BadParameter, match="one device does this work"):
            accelerators.pick_device(names.format(TYPE))

    def test_under_torchrun(self, standin, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with (
            pytest.raises(typer.BadParameter, match=f"a device of its own. Give {TYPE}"),
            process_group("all"),
        ):
            pass


def test_a_process_of_torchrun_uses_its_own_device(standin, monkeypatch):
    """Its device is the current one before anything is put on another, and the backend knows it."""
    asked = {}

    def init(**options):
        asked.update(options, current=torch.standin.current_device())

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda url: iter([(None, 1, 2)]))
    monkeypatch.setattr(torch.distributed, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(torch.distributed, "get_default_backend_for_device", lambda kind: "mine")
    monkeypatch.setattr(process_groups, "_store", None)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    try:
        with counted() as counts, process_group("auto"):
            assert asked["current"] == 1
            assert asked["device_id"] == torch.device(TYPE, 1)
            assert asked["backend"] == f"cpu:gloo,{TYPE}:mine"
            assert counts.by_device().keys() == {1}
    finally:
        torch.standin.set_device(0)
