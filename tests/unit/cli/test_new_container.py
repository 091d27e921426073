"""A container is a file and a line: with these, every verb and function knows it."""

import json

import pytest
import torch

from quark.torch.export import convert, verify
from quark.torch.export.containers.registry import CONTAINERS
from quark.torch.export.recognition import open_checkpoint, read_contents
from tests.unit.export.containers.toy import ENTRY, FILE

FLAGS = ("--quant_scheme", "int4_wo_32")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The line."""
    monkeypatch.setitem(CONTAINERS, "toy", ENTRY)


@pytest.fixture
def path(quantize):
    path, said = quantize(*FLAGS, "--model_export", "toy", "--verify")
    said = " ".join(said.split())
    assert "opened by this package" in said and "toys are read here alone" in said
    assert "model = toy.load(" in said and "14 quantized" in said and "size on disk" in said
    assert {file.name for file in path.iterdir()} == {FILE, "README.md", "SHA256SUMS"}
    return path


def test_it_is_inspected_and_reported(quark, path):
    for place in (path, path / FILE):
        result = quark("inspect", place, "--json")
        assert result.exit_code == 0, result.output
        facts = json.loads(result.stdout)
        assert (facts["quant_method"], facts["model_type"]) == ("toy", "llama")
        assert [scheme["layers"] for scheme in facts["schemes"]] == [14]
    report = json.loads(quark("report", path, "--json").stdout)
    assert (report["method"], report["bytes"]) == ("toy", facts["bytes"])


def test_it_is_converted_from_and_to(quark, path, tmp_path):
    for source, to in ((path, "gptq"), (tmp_path / "gptq", "toy"), (tmp_path / "toy", "quark")):
        result = quark("convert", source, tmp_path / to, "--to", to, "--verify")
        assert result.exit_code == 0, result.output
    ids = torch.arange(32).reshape(2, 16)
    before, after = (open_checkpoint(p).fill()(ids).logits for p in (path, tmp_path / "quark"))
    assert before.equal(after)
    with pytest.raises(ValueError, match="is a toy file already"):
        convert(path, tmp_path / "again", "toy")


def test_it_is_verified_by_its_path(path):
    model = open_checkpoint(path).fill()
    verdict = verify(path, model)
    assert (verdict.difference, verdict.note) == (0, "toys are read here alone")
    assert verdict.bytes == (path / FILE).stat().st_size
    assert len(read_contents(path).summary.layers) == 14


def test_flags_know_it(refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", *FLAGS]
    said = refused("quantize", *place, "--model_export", "toys")
    assert "Did you mean 'toy'?" in said
    assert "toy" in refused("convert", model_dir, tmp_path / "out", "--to", "none")
    said = refused("quantize", *place, "--model_export", "toy", "--custom_mode", "awq")
    assert "a toy file has one layout" in said
