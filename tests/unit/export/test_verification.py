"""Checkpoints opened again: what is right passes, what is wrong is not kept."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter
from quark.torch.export import convert, verify
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.export.containers.safetensors import Safetensors
from quark.torch.export.verification import TOLERANCE, Verdict
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import preset, quantized, spec

SCHEMES = ("int8", "fp8", "w_uint4_per_group_asym", "mxfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_opens_what_is_exported(build, quantize, tmp_path, scheme, dtype):
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    exporter.export_safetensors_model(quantize(build(dtype=dtype), scheme))
    verdict = exporter.verdict
    assert (verdict.difference, verdict.note) == (0, "") and verdict.spread > 0
    assert verdict.reader.startswith("transformers ")
    assert verdict.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_the_native_format_is_opened_here(build, quantize, tmp_path):
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    exporter.export_quark_model(quantize(build(), "int8"))
    assert exporter.verdict.reader == "this package" and exporter.verdict.difference == 0


def test_what_no_installed_software_opens_is_opened_here(build, quantize, tmp_path):
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    exporter.export_safetensors_model(quantize(build(), "fp8"), custom_mode="fp8")
    assert exporter.verdict.reader == "this package" and exporter.verdict.difference == 0
    assert "no other software" in str(exporter.verdict)


BLOCKS = QuantizationConfig(
    QuantizationSpec("fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=128, is_dynamic=True),
    weight=spec("fp8_e4m3", "per_block", block_size=(128, 128)),
)


@pytest.mark.parametrize(("mode", "scheme"), [("fp8", BLOCKS), ("mxfp8", "mxfp8")])
class TestInputsInFloat:
    """On a CPU, Transformers dequantizes the weights: the model leaves its inputs in float too."""

    @pytest.fixture
    def model(self, build, scheme):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.2}
        return quantized(build(**sizes), preset(scheme))

    def test_transformers_opens_it(self, model, mode, scheme, tmp_path):
        ids = torch.arange(12).reshape(2, 6)
        before = model(ids).logits
        exporter = ModelExporter(None, tmp_path / "out", verify=True)
        exporter.export_safetensors_model(model, custom_mode=mode)
        verdict = exporter.verdict
        assert verdict.reader.startswith("transformers ") and "accelerate" in verdict.reader
        assert "weights alone" in verdict.note
        assert verdict.difference < 1e-4 * verdict.spread
        assert torch.equal(model(ids).logits, before)
        assert "quark" in Safetensors().load_code(tmp_path / "out")

    def test_a_loaded_model(self, model, mode, scheme, tmp_path):
        ModelExporter(tmp_path / "in").export_safetensors_model(model)
        verdict = convert(tmp_path / "in", tmp_path / "out", mode, verify=True)
        assert verdict.reader.startswith("transformers ")
        assert verdict.difference < 1e-4 * verdict.spread

    def test_scales_that_are_wrong(self, model, mode, scheme, tmp_path):
        ModelExporter(tmp_path / "out").export_safetensors_model(model, custom_mode=mode)
        file = tmp_path / "out" / "model.safetensors"
        tensors = load_file(file)
        scales = {n: t for n, t in tensors.items() if n.endswith("up_proj.weight_scale_inv")}
        changed = {n: t + 1 if t.dtype == torch.uint8 else t * 2 for n, t in scales.items()}
        save_file(tensors | changed, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match="does not compute"):
            verify(tmp_path / "out", model)

    def test_blocks_that_an_edge_cuts(self, build, mode, scheme, tmp_path):
        """Transformers 5.23 divides 240 columns by their scales: blocks of 120 and of 30."""
        sizes = {"hidden_size": 160, "intermediate_size": 240, "num_attention_heads": 2}
        exporter = ModelExporter(None, tmp_path / "out", verify=True)
        model = quantized(build(**sizes), preset(scheme))
        exporter.export_safetensors_model(model, custom_mode=mode)
        assert exporter.verdict.reader == "this package" and exporter.verdict.difference == 0


def test_nothing_is_opened_unless_asked_for(build, quantize, tmp_path, monkeypatch):
    def opened(*_):
        raise AssertionError

    monkeypatch.setattr(Safetensors, "verify", opened)
    exporter = ModelExporter(tmp_path / "out")
    exporter.export_safetensors_model(quantize(build(), "int8"))
    assert exporter.verdict is None


class TestWrong:
    @pytest.fixture
    def model(self, build, quantize):
        return quantize(build(), "w_uint4_per_group_asym")

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("weight", lambda t: t.flip(0)),
            ("weight_scale", lambda t: t.roll(1, 0)),
            ("weight_scale", lambda t: t * 2),
            ("weight_zero_point", lambda t: t ^ 0x11111111),
        ],
        ids=["order of codes", "order of groups", "scales", "offsets"],
    )
    def test_a_file_that_says_something_else(self, model, export, name, change):
        path = export(model)
        stored = load_file(path / "model.safetensors")
        for key in [k for k in stored if k.endswith(f"_proj.{name}")]:
            stored[key] = change(stored[key]).contiguous()
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match="does not compute what the model in memory does"):
            verify(path, model)

    def test_it_does_not_take_the_place_of_an_earlier_one(self, model, tmp_path, monkeypatch):
        ModelExporter(tmp_path / "out").export_safetensors_model(model)
        before = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}

        add = ShardWriter.add

        def rotten(writer, name, tensor):
            add(writer, name, tensor.flip(0) if name.endswith("_proj.weight") else tensor)

        monkeypatch.setattr(ShardWriter, "add", rotten)
        exporter = ModelExporter(None, tmp_path / "out", overwrite=True, verify=True)
        with pytest.raises(ValueError, match="does not compute"):
            exporter.export_safetensors_model(model)
        assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == before
        assert [f.name for f in tmp_path.iterdir()] == ["out"]

    def test_what_transformers_does_not_open_is_said(self, model, export, monkeypatch, caplog):
        def fails(*_):
            raise RuntimeError("no kernel\nat all")

        monkeypatch.setattr("quark.torch.export.verification._load_with_transformers", fails)
        verdict = verify(export(model), model)
        assert verdict.reader == "this package"
        assert verdict.note == "Transformers does not open it: no kernel"
        (said,) = caplog.messages
        assert said.startswith("Verified: this package reads the checkpoint, and it computes")
        assert said.endswith(f"Not verified: that other software opens it ({verdict.note}).")

    def test_a_file_that_nothing_opens(self, model, export):
        path = export(model)
        (path / "model.safetensors").write_bytes(b"rubbish")
        with pytest.raises(ValueError, match="damaged or not a safetensors file"):
            verify(path, model)

    def test_not_a_language_model(self, quantize, tmp_path):
        model = quantize(torch.nn.Sequential(torch.nn.Linear(64, 32)), "int4_wo_32", None)
        exporter = ModelExporter(None, tmp_path / "out", verify=True)
        with pytest.raises(ValueError, match="Only language models of Transformers"):
            exporter.export_safetensors_model(model)
        assert not (tmp_path / "out").exists()

    def test_a_model_of_images(self, quantize, tmp_path):
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, image_size=32, **sizes))
        model = quantize(model.eval(), "int4_wo_32", None)
        exporter = ModelExporter(None, tmp_path / "out", verify=True)
        with pytest.raises(ValueError, match="has no config with a vocab_size"):
            exporter.export_safetensors_model(model)


def test_the_model_is_as_it_was(build, quantize, export):
    model = quantize(build(), "int8").train()
    verify(export(model), model)
    assert model.training


def test_a_missing_package_is_named(build, quantize, tmp_path, monkeypatch):
    monkeypatch.setattr("quark.torch.export.verification.find_spec", lambda name: None)
    model = quantize(build(), "int4_wo_32")
    exporter = ModelExporter(None, tmp_path / "out", verify=True)
    exporter.export_safetensors_model(model, custom_mode="gptq")
    assert exporter.verdict.note == "gptqmodel, optimum not installed"
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "gptq"


def test_a_verdict_in_words():
    said = str(Verdict("tool 1.0", 0.0123, 2.0, 1_500_000, "not on a GPU"))
    assert said.startswith("opened by tool 1.0: log-probabilities differ by up to 1.2e-02")
    assert "1.5 MB" in said and said.endswith("(not on a GPU)")
    assert 0 < TOLERANCE < 1
