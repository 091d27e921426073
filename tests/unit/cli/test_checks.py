"""Models are checked before any text is read, and digests where they are asked for."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from quark.torch.digests import DIGESTS, write_digests


@pytest.fixture
def damaged(model_dir, tmp_path):
    """Return a float model without one of its tensors."""
    path = shutil.copytree(model_dir, tmp_path / "damaged")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


CALLS = {
    "quantize": ["--output_dir", "out", "--quant_scheme", "int8", "--model_dir"],
    "sample": ["--output", "out.jsonl", "--model_dir"],
    "collect": ["--output_dir", "out", "--model_dir"],
    "search": ["--target_bits", "4", "--model_dir"],
    "evaluate": [],
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_damaged_model_is_refused_before_text_is_read(
    quark, damaged, verb, monkeypatch, tmp_path
):
    from quark.cli import models

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "text_windows", None)  # fails if it is called
    result = quark(verb, *CALLS[verb], damaged)
    assert result.exit_code == 1, result.output
    said = " ".join(result.stderr.split())
    assert f"{damaged}: The checkpoint does not fit LlamaForCausalLM: model.norm.weight" in said
    assert "reading text" not in said


def test_a_report_of_a_float_model_asks_for_another_call_whole_or_not(quark, damaged):
    result = quark("report", damaged, "--json")
    assert result.exit_code == 2
    assert "is not a quantized checkpoint. Quantize the model first" in result.stderr


def test_a_short_name_is_named_too(quark, damaged, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    damaged.rename("m")  # a letter of any message
    assert "error: m: The checkpoint does not fit" in quark("evaluate", "m").stderr


@pytest.fixture
def changed(quantize):
    """Return a quantized model with one bit of its data changed."""
    path, _ = quantize("--quant_scheme", "int8_wo")
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "call",
    [
        ["evaluate"],
        ["report", "--output", "page.html"],
        ["convert", "--to", "compressed-tensors"],
        ["quantize", "--model_reload", "--output_dir", "other", "--import_model_dir"],
    ],
    ids=lambda call: call[0],
)
def test_a_changed_file_is_refused(quark, changed, model_dir, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    more = {"convert": ["converted"], "quantize": ["--model_dir", model_dir, "--skip_quantization"]}
    result = quark(*call, changed, *more.get(call[0], []), "--check_digests")
    assert result.exit_code == 1, result.output
    assert "model.safetensors has changed since it was written" in " ".join(result.stderr.split())


def test_inspect_lists_the_state_of_files(quark, changed):
    (changed / "notes.txt").write_text("mine")
    (changed / "generation_config.json").unlink()
    result = quark("inspect", changed, "--check", "--json")
    assert result.exit_code == 1
    files = json.loads(result.stdout)["files"]
    assert (files.pop("model.safetensors"), files.pop("notes.txt")) == ("changed", "not listed")
    assert files.pop("generation_config.json") == "missing"
    assert set(files.values()) == {"ok"} and "config.json" in files
    table = quark("inspect", changed, "--check").stdout
    assert [line.split()[-1] for line in table.splitlines() if "model.safetensors" in line] == [
        "changed"
    ]


def test_inspect_of_sound_files(quark, quantize, model_dir):
    path, _ = quantize("--quant_scheme", "int8_wo")
    assert quark("inspect", path, "--check").exit_code == 0
    assert quark("inspect", path / "model.safetensors", "--check").exit_code == 0
    (path / "other.gguf").write_text("")
    assert quark("inspect", path / "other.gguf", "--check").exit_code == 1
    result = quark("inspect", model_dir, "--check")
    assert result.exit_code == 1 and "has no SHA256SUMS" in result.stderr


def test_inspect_checks_that_tensors_fit(quark, model_dir, damaged):
    write_digests(damaged)  # files are as they were written, but not what the model needs
    result = quark("inspect", damaged, "--check")
    assert result.exit_code == 1
    assert "model.norm.weight" in result.stderr and str(damaged) in result.stderr


def test_search_checks_its_flags_before_the_model(quark, model_dir, tmp_path, monkeypatch):
    from quark.cli.search import command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "find_float_model", None)  # fails if it is called
    formats = ["--formats", "int4_wo_128,int8_wo", "--model_dir", model_dir]
    result = quark("search", "--target_bits", "3.5", *formats)
    assert result.exit_code == 2
    assert "3.5 is less than the 4 bits of int4_wo_128" in " ".join(result.stderr.split())
    result = quark("search", "--target_bits", "4.5", *formats, "--statistics", "none")
    assert result.exit_code == 2 and "does not exist" in result.stderr


def test_collect_needs_room_before_the_data_runs(quark, model_dir, tmp_path, monkeypatch):
    from quark.torch import files
    from quark.torch.statistics import collection

    free = type("usage", (), {"free": 20_000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(collection, "run_blocks", None)  # not called
    result = quark("collect", "--output_dir", tmp_path / "out", "--model_dir", model_dir)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "--output_dir" in said and "will be written: make room" in said


@pytest.fixture
def params(quantize, tmp_path):
    """Return the flags that read saved parameters, and their directory."""
    place = tmp_path / "params"
    quantize("--quant_scheme", "int8_wo", "--params_save", "--save_dir", place)
    files = ["--json_path", place / "llama.json"]
    return ["--params_load", *files, "--safetensors_path", place / "llama.safetensors"], place


def test_parameters_are_compared_with_their_digests(quark, params, model_dir, monkeypatch):
    from quark.cli import models

    flags, place = params
    call = ["quantize", "--model_dir", model_dir, *flags, "--check_digests"]
    assert quark(*call, "--num_eval_data", "1").exit_code == 0
    monkeypatch.setattr(models, "text_windows", None)  # fails if it is called
    file = place / "llama.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:])
    result = quark(*call)
    assert result.exit_code == 1
    assert "llama.safetensors has changed since it was written" in " ".join(result.stderr.split())
    file.write_bytes(sound)
    (place / DIGESTS).unlink()
    result = quark(*call)
    assert result.exit_code == 1 and "has no SHA256SUMS" in " ".join(result.stderr.split())


def test_statistics_are_compared_with_their_digests(quark, quantize, tmp_path, monkeypatch):
    model, _ = quantize("--quant_scheme", "int8_wo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/statistics.json").write_text("{}")
    formats = ["--formats", "int4_wo_32,int8_wo", "--model_dir", model]
    call = ["search", "--target_bits", "5", *formats, "--statistics", "kept"]
    assert "holds no statistics" in " ".join(quark(*call).stderr.split())
    result = quark(*call, "--check_digests")
    assert result.exit_code == 2 and "has no SHA256SUMS" in " ".join(result.stderr.split())


@pytest.mark.parametrize("kind", ["model", "parameters"])
def test_a_reloaded_model_is_checked_before_text_is_read(
    quark, quantize, params, model_dir, kind, monkeypatch, tmp_path
):
    """The model is sound, but the format cannot hold it; or its parameters are damaged."""
    from quark.cli import models

    monkeypatch.setattr(models, "text_windows", None)  # fails if it is called
    if kind == "model":
        path, _ = quantize("--quant_scheme", "int8_wo")
        flags = ["--model_reload", "--import_model_dir", path, "--output_dir", tmp_path / "new"]
        flags += ["--model_export", "hf_format", "--custom_mode", "fp8"]
        message = "fp8"
    else:
        flags, place = params
        tensors = load_file(place / "llama.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, place / "llama.safetensors")
        message = "model.norm.weight is missing"
    result = quark("quantize", "--model_dir", model_dir, *flags)
    assert result.exit_code == (2 if kind == "model" else 1), result.output
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--dataset", "missing.txt"], "--dataset: there is no file or directory missing.txt"),
        (["--dataset", "chats.jsonl"], "--dataset: the model has no chat template"),
        (["--dataset", "chats.jsonl:0.5,a.txt:0.5"], "--dataset: the model has no chat template"),
        (["--eval_data", "chats.jsonl"], "--eval_data: the model has no chat template"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_texts_are_checked_before_the_model_is_loaded(
    quark, model_dir, flags, error, monkeypatch, tmp_path
):
    from quark.cli import models

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "chats.jsonl").write_text('[{"role": "user", "content": "Why?"}]\n')
    monkeypatch.setattr(models, "load_model", None)  # fails if it is called
    given = ["--model_dir", model_dir, "--output_dir", "out", "--quant_scheme", "int8", *flags]
    result = quark("quantize", *given)
    assert result.exit_code == 2, result.output
    assert error in " ".join(result.stderr.split())
    if "missing.txt" in flags:
        assert not result.stdout  # not even the plan
