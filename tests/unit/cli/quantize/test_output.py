"""Refusals come before the work, and the result is kept if it cannot be written."""

import errno
import json
import tempfile

import pytest

from quark.cli import models
from quark.torch import ModelQuantizer
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.export.containers.safetensors import Safetensors


@pytest.fixture
def place(model_dir, tmp_path):
    return ["quantize", "--model_dir", model_dir, "--output_dir", tmp_path / "out"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["fp8", "--custom_mode", "awq"], "custom_mode='awq' cannot hold"),
        (["fp8", "--model_export", "gguf"], "GGUF cannot hold"),
        (["int4_wo_24"], "groups of 24 do not divide"),
    ],
)
def test_refused_before_text_is_read(flags, said, place, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "text_windows", None)  # would fail if it were called
    monkeypatch.setattr(ModelQuantizer, "quantize_model", None)
    assert said in refused(*place, "--quant_scheme", *flags)
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_are_refused_by_name(place, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)
    (tmp_path / "thesis.tex").write_text("years")
    place[-1] = tmp_path
    said = refused(*place, "--quant_scheme", "int8_wo", "--overwrite")
    assert "holds thesis.tex, not only an earlier output" in said
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.fixture
def broken(monkeypatch):
    """The disk fails while the first directory is written."""
    write, calls = Safetensors.write, []

    def fail(self, model, target, settings):
        calls.append(settings.custom_mode)
        if len(calls) > 1:
            return write(self, model, target, settings)
        with target(0) as directory:
            (directory / "half").touch()
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Safetensors, "write", fail)
    return calls


def test_the_result_is_kept_if_writing_fails(place, refused, broken, tmp_path):
    (tmp_path / "out-kept").mkdir()  # a name in use
    flags = ["--quant_scheme", "uint4_wo_32", "--custom_mode", "awq", "--skip_evaluation"]
    said = refused(*place, *flags, "--quant_flow", "standard", code=1)
    assert "Input/output error" in said and f"is kept in {tmp_path / 'out-kept1'}" in said
    assert broken == ["awq", "quark"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-kept", "out-kept1"]
    model = models.load_model(tmp_path / "out-kept1")
    assert model.quant_config is not None
    assert (tmp_path / "out-kept1" / "tokenizer.json").is_file()


def test_it_says_so_if_that_fails_too(place, refused, tmp_path, monkeypatch):
    def fail(self, model, target, settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Safetensors, "write", fail)
    flags = ["--quant_scheme", "int8_wo", "--skip_evaluation", "--quant_flow", "standard"]
    said = refused(*place, *flags, code=1)
    assert "could not be kept in" in said and said.count("No space left") == 2
    assert list(tmp_path.iterdir()) == []


def test_files_to_files_leave_nothing_if_the_disk_is_full(place, refused, tmp_path, monkeypatch):
    def fail(self, name, tensor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "add", fail)
    said = refused(*place, "--quant_scheme", "int8_wo", "--skip_evaluation", code=1)
    assert "No space left" in said and list(tmp_path.iterdir()) == []


def test_two_kinds_of_files_share_a_directory(place, quark, tmp_path):
    flags = ["--model_export", "hf_format", "--model_export", "gguf", "--skip_evaluation"]
    pytest.importorskip("gguf")
    for more in ([], ["--overwrite"]):
        result = quark(*place, "--quant_scheme", "uint4_wo_32", *flags, *more)
        assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "model.gguf"} <= names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_activations_go_to_the_directory_of_the_user(
    place, quark, refused, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("quark.torch.pipeline.runner.current_limit", lambda: 0)
    seen, make = [], tempfile.TemporaryDirectory
    monkeypatch.setattr(
        tempfile,
        "TemporaryDirectory",
        lambda **more: (seen.append(more.get("dir")), make(**more))[1],
    )
    flags = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--dataset", text]
    flags += ["--skip_evaluation", "--num_calib_data", 2, "--offload_dir"]
    assert "Make it first" in refused(*place, *flags, tmp_path / "gone")
    assert quark(*place, *flags, tmp_path).exit_code == 0
    assert tmp_path in seen
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


INT4, INT8 = ["--quant_scheme", "int4_wo_32"], ["--quant_scheme", "int8_wo"]
ORDER = ["--pack_method", "order"]
FLOATS = ["--export_weight_format", "fake_quantized"]
CACHE = "ppl_eval_for_kv_cache"
# Flags that are given without what they act on, and what the message says.
IDLE = [
    ([*INT4, "--model_export", "gguf", *FLOATS], "--export_weight_format: a GGUF file has one"),
    ([*INT4, "--model_export", "gguf", *ORDER], "--pack_method: a GGUF file has one layout"),
    ([*INT4, "--model_export", "onnx", *ORDER], "--pack_method: an ONNX file has one layout"),
    ([*INT8, *ORDER], "--pack_method: only 4-bit integers"),
    (["--quant_scheme", "mxfp4_weight_only", *ORDER], "--pack_method: only 4-bit integers"),
    ([*INT4, "--custom_mode", "gptq", *ORDER], "has its own order of codes"),
    ([*INT4, "--save_dir", "x"], "--save_dir: needs --params_save"),
    ([*INT4, "--metrics_output_dir", "x"], "--metrics_output_dir: needs --save_metrics_to_csv"),
    ([*INT4, "--max_eval_batch_size", "3"], "needs --eval_batch_size auto"),
    *(
        ([*INT4, f"--{CACHE}_{part}_size", "9"], f"--{CACHE}_{part}_size: needs --use_{CACHE}")
        for part in ("context", "sample", "patch")
    ),
]


@pytest.mark.parametrize(("flags", "said"), IDLE)
@pytest.mark.parametrize("more", [[], ["--plan"]])
def test_flags_without_what_they_act_on(refused, model_dir, tmp_path, flags, said, more):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    assert said in refused("quantize", *place, *flags, *more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["int4_wo_32", "int8_wo"])
def test_an_order_of_some_codes_is_followed(quantize, scheme):
    """It is that of the 4-bit layers, though other layers have codes of 8 bits."""
    layers = ["--layer_quant_scheme", "*q_proj", "int4_wo_32"]
    path, _ = quantize("--quant_scheme", scheme, *layers, *ORDER, "--skip_evaluation")
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert section["export"]["pack_method"] == "order"


def test_an_order_of_a_model_that_is_read_again(quantize, refused, quark, tmp_path):
    for scheme in ("int8_wo", "int4_wo_32"):
        path, _ = quantize("--quant_scheme", scheme, "--skip_evaluation")
        flags = ["--model_dir", path, "--model_reload", "--import_model_dir", path, *ORDER]
        flags += ["--model_export", "hf_format", "--skip_evaluation"]
        flags += ["--output_dir", tmp_path / "again" / scheme]
        if scheme == "int8_wo":
            assert "only 4-bit integers" in refused("quantize", *flags)
        else:
            assert quark("quantize", *flags).exit_code == 0
