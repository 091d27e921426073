"""Verbs take the name of a model on the Hub where they take its directory."""

import json

import huggingface_hub
import pytest


@pytest.fixture
def hub(monkeypatch, quantize, model_dir):
    """The Hub has me/llama and me/int4; what was asked for."""
    places = {"me/llama": model_dir, "me/int4": quantize("--quant_scheme", "int4_wo_32")[0]}
    asked = []

    def snapshot_download(name, revision, ignore_patterns):
        asked.append(name)
        if name not in places:
            raise OSError(f"no model {name}")
        return str(places[name])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


FLAGS = ["--limit", 2, "--seq_len", 16, "--json"]


def test_evaluate(hub, quark, text):
    flags = ["--original", "me/llama", "--dataset", text, *FLAGS]
    found = json.loads(quark("evaluate", "me/int4", *flags).stdout)
    assert [row["model"] for row in found["models"]] == ["me/llama", "me/int4"]
    assert hub == ["me/int4", "me/llama"]


def test_compare(hub, quark, text):
    flags = ["--dataset", text, "--new_tokens", 0, *FLAGS]
    found = json.loads(quark("compare", "me/llama", "me/int4", *flags).stdout)
    assert [row["directory"] for row in found["models"]] == ["me/llama", "me/int4"]


def test_report_and_convert(hub, quark, tmp_path):
    found = json.loads(quark("report", "me/int4", "--original", "me/llama", "--json").stdout)
    assert len(found["layers"]) == 14
    out = tmp_path / "ct"
    result = quark("convert", "me/int4", out, "--to", "compressed-tensors")
    assert result.exit_code == 0, result.output
    assert (out / "config.json").is_file()
    _, code = result.stdout.split("Load it:")
    assert code.strip().startswith("model = ") and str(out) in code
    assert f"vllm serve {out}" in code


def test_a_name_that_is_not_there(hub, refused):
    said = refused("evaluate", "me/gone")
    assert "no model of that name can be reached" in said
    assert hub == ["me/gone"]
