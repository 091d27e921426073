"""``--device`` of the command line."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from quark.cli import accelerators
from quark.cli.main import app
from quark.demo.text import model_directory
from tests.device.stand_in import COUNT, TYPE
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


def test_files_are_those_of_the_cpu(standin, build, tmp_path):
    from transformers import AutoTokenizer

    build(vocab_size=2048, hidden_size=32).save_pretrained(tmp_path / "float")
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(tmp_path / "float")
    flags = [
        "--quant_scheme",
        "fp8",
        "--kv_cache_dtype",
        "fp8",
        "--model_attn_implementation",
        "eager",
        "--num_calib_data",
        "4",
    ]
    flags += ["--seq_len", "16", "--skip_evaluation", "--model_dir", str(tmp_path / "float")]
    for device in ("cpu", TYPE):
        output = ["--output_dir", str(tmp_path / device), "--device", device]
        result = CliRunner().invoke(app, ["quantize", *flags, *output], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert contents(tmp_path / "cpu") == contents(tmp_path / TYPE)
