"""``quark compare``: figures of several models, those of the other verbs, as tables and a page."""

import json
import shutil

import pytest

from quark.cli.compare.measurement import Plan
from quark.cli.compare.tables import print_comparison

FLAGS = ["--seq_len", 32, "--limit", 3]


@pytest.fixture
def pair(quantize):
    """Two quantized models."""
    return [quantize("--quant_scheme", name)[0] for name in ("int4_wo_32", "int8_wo")]


def test_figures_are_those_of_report_and_evaluate(quark, pair, model_dir, text):
    flags = ["--dataset", text, *FLAGS, "--json"]
    found = json.loads(quark("compare", model_dir, *pair, "--layers", *flags).stdout)
    assert [row["directory"] for row in found["models"]] == [str(p) for p in (model_dir, *pair)]
    known = {"source": str(text), "windows": 3, "tokens": 32}
    assert {name: found["text"][name] for name in known} == known
    original, *rows = found["models"]
    assert original["predictions"]["kl"] is original["predictions"]["change"] is None
    assert original["weight_errors"] == {} == original["routers"]
    for path, row in zip(pair, rows, strict=True):
        report = json.loads(quark("report", path, "--original", model_dir, *flags).stdout)
        predictions = dict(row["predictions"])
        change = predictions.pop("change")
        assert predictions == report["predictions"]
        assert change == predictions["perplexity"] / original["predictions"]["perplexity"] - 1
        assert row["bytes"] == (path / "model.safetensors").stat().st_size
        errors = {layer["name"]: layer["error"]["relative"] for layer in report["layers"]}
        assert row["weight_errors"] == errors
    int4, int8 = rows
    assert (int4["bits_per_weight"], int8["bits_per_weight"]) == (4 + 36 / 32, 8 + 36 / 32)
    assert int4["predictions"]["kl"] > int8["predictions"]["kl"] > 0
    assert int4["predictions"]["kl_error"] > 0
    assert int4["schemes"] == "weight int4 per group 32 sym"


def test_tables(quark, pair, model_dir, text):
    result = quark("compare", model_dir, *pair, "--layers", "--dataset", text, *FLAGS)
    assert result.exit_code == 0, result.output
    assert "All models continue:" in result.stdout
    assert "Errors of weights, the 10 largest" in result.stdout
    shown = " ".join(result.stdout.split())
    assert shown.count(" ± ") >= 4
    assert "3 windows of 32 tokens" in shown
    assert print_comparison is not None and Plan is not None


def test_continuations_are_those_of_generate(quark, pair, model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = ["--prompt", "Return the value", "--new_tokens", 6, *FLAGS, "--json"]
    found = json.loads(quark("compare", model_dir, pair[0], *flags).stdout)
    assert found["prompt"].endswith("Return the value")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokens = tokenizer("Return the value", return_tensors="pt")["input_ids"]
    for row in found["models"]:
        model = AutoModelForCausalLM.from_pretrained(row["directory"])
        written = model.generate(tokens, max_new_tokens=6, do_sample=False)[0, tokens.shape[1] :]
        expected = tokenizer.decode(written, skip_special_tokens=True)
        assert row["continuation"]["text"] == expected
        assert row["continuation"]["tokens_per_second"] > 0


def test_no_continuation(quark, pair, model_dir, text):
    flags = ["--new_tokens", 0, "--dataset", text, *FLAGS]
    result = quark("compare", model_dir, pair[0], *flags)
    assert " /s " not in result.stdout
    assert "continue" not in result.stdout


def test_page_and_numbers(quark, pair, model_dir, text, tmp_path):
    page = tmp_path / "c.html"
    flags = ["--layers", "--dataset", text, *FLAGS, "--output", page, "--json"]
    result = quark("compare", model_dir, *pair, *flags)
    assert result.exit_code == 0, result.output
    numbers = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert numbers == json.loads(result.stdout)
    written = page.read_text(encoding="utf-8")
    assert written.startswith("<!doctype html>")
    for row in numbers["models"]:
        assert f'title="{row["directory"]}">{row["name"]}</td>' in written
    kl = 1000 * numbers["models"][1]["predictions"]["kl"]
    assert f">{kl:.1f} ± " in written


def test_memory_is_bounded(quark, pair, model_dir, text):
    """In parts, with the same figures as in memory, window by window."""
    flags = ["--dataset", text, "--new_tokens", 0, *FLAGS, "--json"]
    whole = json.loads(quark("compare", model_dir, pair[0], "--batch_size", 1, *flags).stdout)
    parts = quark("compare", model_dir, pair[0], "--max_memory", "20GB", *flags)
    found = json.loads(parts.stdout)
    for row, other in zip(found["models"], whole["models"], strict=True):
        assert row["predictions"] == pytest.approx(other["predictions"])


def test_refusals(refused, pair, model_dir, text, tmp_path):
    assert "is given twice" in refused("compare", model_dir, pair[0], pair[0])
    assert "is given twice" in refused("compare", model_dir, model_dir)
    assert "there is no directory" in refused("compare", model_dir, tmp_path / "gone")
    assert "it is empty" in refused("compare", model_dir, pair[0], "--prompt", " ")
    assert "Name an .html" in refused("compare", model_dir, pair[0], "--output", "a.json")
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    said = refused("compare", model_dir, other)
    assert "predicts 7 tokens and the first model 2048" in said


@pytest.mark.nightly
def test_speed_is_measured_in_a_process_of_each_model(quark, pair, model_dir, text, tmp_path):
    page = tmp_path / "c.html"
    flags = ["--dataset", text, *FLAGS, "--speed", "--output", page]
    result = quark("compare", model_dir, pair[0], *flags)
    assert result.exit_code == 0, result.output
    assert "prompt tokens/s" in result.stdout
    for row in json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))["models"]:
        assert row["speed"]["new"] > 0
        assert f"{row['speed']['prompt']:.1f} ± " in page.read_text(encoding="utf-8")


def test_speed_in_parts_is_refused(refused, pair, model_dir):
    said = refused("compare", model_dir, pair[0], "--speed", "--max_memory", "20GB")
    assert "the speed of the disk" in said
