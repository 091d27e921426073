"""``quark report``: the page and its numbers beside it, or the numbers alone."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

FLAGS = ["--seq_len", 32, "--limit", 3]


def test_page_and_numbers(quark, quantize, model_dir, text, tmp_path):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    page = tmp_path / "found.html"
    flags = ["--original", model_dir, "--dataset", text, *FLAGS]
    result = quark("report", path, *flags, "--output", page)
    assert result.exit_code == 0, result.output
    numbers = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    printed = json.loads(quark("report", path, *flags, "--json").stdout)
    for found in (numbers, printed):
        speeds = [row.pop("tokens_per_second") for row in found["continuations"].values()]
        assert min(speeds) > 0
    assert numbers == printed
    written = page.read_text(encoding="utf-8")
    assert all(layer["name"] in written for layer in numbers["layers"])
    shown = " ".join(result.stdout.split())
    assert all(sentence in shown for sentence in numbers["verdict"])
    assert numbers["worst"][0]["name"] in result.stdout
    assert numbers["advice"][0]["flags"] == "--recipe w4"
    assert shown.count("--recipe w4") == 1
    assert sorted(numbers["continuations"]) == ["original", "quantized"]
    assert [f.name for f in tmp_path.iterdir() if "partial" in f.name] == []


def test_the_perplexities_are_those_of_evaluate(quark, quantize, model_dir, text):
    path, _ = quantize("--quant_scheme", "int8_wo")
    flags = ["--original", model_dir, "--dataset", text, *FLAGS, "--json"]
    found = json.loads(quark("report", path, *flags).stdout)["predictions"]
    original, quantized = json.loads(quark("evaluate", path, *flags).stdout)["models"]
    assert found["original"] == original["perplexity"]
    assert found["perplexity"] == pytest.approx(quantized["perplexity"], rel=1e-6)


def test_both_models_continue_the_prompt(quark, quantize, model_dir, text):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    flags = ["--original", model_dir, "--dataset", text, *FLAGS, "--json"]
    found = json.loads(
        quark("report", path, *flags, "--prompt", "Return the", "--new_tokens", 5).stdout
    )
    assert found["prompt"].endswith("Return the")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = tokenizer("Return the", return_tensors="pt")["input_ids"]
    for name, directory in {"original": model_dir, "quantized": path}.items():
        model = AutoModelForCausalLM.from_pretrained(directory)
        written = model.generate(tokens, max_new_tokens=5, do_sample=False)[0, tokens.shape[1] :]
        expected = tokenizer.decode(written, skip_special_tokens=True)
        assert found["continuations"][name]["text"] == expected
    silent = json.loads(quark("report", path, *flags, "--new_tokens", 0).stdout)
    assert (silent["prompt"], silent["continuations"]) == ("", {})


@pytest.mark.parametrize(
    "flags",
    [
        ["fp8", "--kv_cache_dtype", "fp8"],
        ["fp8", "--kv_cache_dtype", "fp8", "--custom_mode", "fp8"],
        ["uint4_wo_32", "--custom_mode", "gptq"],
        ["uint4_wo_32", "--custom_mode", "compressed-tensors"],
        ["int8_wo", "--model_export", "quark_format"],
    ],
    ids=["quark", "fp8", "gptq", "compressed-tensors", "native"],
)
def test_the_sizes_are_those_of_inspect(quark, quantize, flags):
    path, _ = quantize("--quant_scheme", *flags)
    found = json.loads(quark("report", path, "--json").stdout)
    summary = json.loads(quark("inspect", path, "--json").stdout)
    assert found["bytes"] == summary["bytes"]
    assert {x["name"]: (x["scheme"], 8 * x["bytes"]) for x in found["layers"]} == {
        x["name"]: (x["scheme"], x["bits"]) for x in summary["layers"]
    }


def test_the_native_format(quark, quantize, model_dir):
    path, _ = quantize("--quant_scheme", "int8_wo", "--model_export", "quark_format")
    result = quark("report", path, "--original", model_dir, "--json")
    assert len(json.loads(result.stdout)["layers"]) == 14


def test_gguf(quark, quantize, model_dir, tmp_path):
    pytest.importorskip("gguf")
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    assert quark("convert", path, tmp_path / "gguf", "--to", "gguf").exit_code == 0
    found, other = (
        json.loads(quark("report", p, "--original", model_dir, "--json").stdout)
        for p in (tmp_path / "gguf", path)
    )
    assert (found["method"], other["method"]) == ("gguf", "quark")
    summary = json.loads(quark("inspect", tmp_path / "gguf", "--json").stdout)
    assert found["bytes"] == summary["bytes"]
    assert [8 * x["bytes"] / x["weights"] for x in found["layers"]] == [4.5] * 14
    assert [x["bits"] / x["weights"] for x in summary["layers"]] == [4.5] * 14
    errors = [{x["name"]: x["error"]["relative"] for x in r["layers"]} for r in (found, other)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)  # scales of GGUF are float16


def test_inputs_that_calibration_hardly_saw(quark, quantize, refused, model_dir, text, tmp_path):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    flags = ["--original", model_dir, "--dataset", text, *FLAGS]
    other = tmp_path / "other.txt"
    other.write_text("0123456789 " * 200, encoding="utf-8")
    collected = tmp_path / "statistics"
    made = ["--dataset", other, "--seq_len", 32, "--num_calib_data", 4, "--output_dir", collected]
    assert quark("collect", "--model_dir", model_dir, *made).exit_code == 0
    found = json.loads(quark("report", path, *flags, "--statistics", collected, "--json").stdout)
    assert found["unseen"]["text"] > found["unseen"]["calibration"]
    assert found["unseen"]["tokens"][0]["text"].split()[0].isalpha()  # words, not identifiers
    message = refused("report", path, "--statistics", collected, "--json")
    assert "it needs --original and --dataset" in message
    message = refused("report", path, *flags, "--statistics", tmp_path / "gone", "--json")
    assert "gone" in message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--original", "gone"], "there is no directory gone"),
        (["--output", "gone/a.html"], "there is no directory gone"),
        (["--output", "a.json"], "Name an .html file"),
        (["--dataset", "gone.txt"], "gone.txt"),
        (["--dataset", "text.doc"], "is of unknown type '.doc'"),
        (["--prompt", "Why?"], "Give a text, too"),
        (["--prompt", " "], "it is empty"),
    ],
    ids=["original", "folder", "name", "text", "type of text", "prompt alone", "empty prompt"],
)
def test_wrong_flags(flags, said, quantize, refused, monkeypatch, tmp_path):
    path, _ = quantize("--quant_scheme", "int8_wo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.doc").touch()
    monkeypatch.setattr("quark.cli.models.check_model", None)  # refused before any work
    assert said in refused("report", path, *flags)


def test_files_are_replaced_only_on_request(quark, quantize, refused, tmp_path):
    path, _ = quantize("--quant_scheme", "int8_wo")
    page = tmp_path / "a.html"
    page.write_text("kept")
    assert "give --overwrite" in refused("report", path, "--output", page)
    assert page.read_text() == "kept"
    assert quark("report", path, "--output", page, "--overwrite").exit_code == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_is_no_quantized_model(refused, model_dir, tmp_path):
    assert "not a quantized checkpoint" in refused("report", model_dir, "--json")
    assert "there is no" in refused("report", tmp_path / "gone", "--json")
