"""What a checkpoint consists of, and that writing it leaves the model alone."""

import errno
import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quark import __version__
from quark.torch import ModelExporter, ModelQuantizer, files
from quark.torch.digests import DIGESTS
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark.torch.export.checkpoint.shards import ShardWriter
from quark.torch.files import size_of
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
)
from quark.torch.quantization.config.presets import scheme

INT8 = Int8PerTensorSpec().to_quantization_spec()
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
FUSED = [["*q_proj", "*k_proj", "*v_proj"], ["*gate_proj", "*up_proj"]]


def tensors_of(path):
    return load_file(path / "model.safetensors")


def json_of(path):
    return json.loads((path / "config.json").read_text())


def contents(path):
    return {f.name: f.read_bytes() for f in path.iterdir() if f.name != DIGESTS}


class TestRefusals:
    @pytest.fixture(params=["export_safetensors_model", "export_quark_model"])
    def refused(self, request, tmp_path, unchanged):
        def refused(model, error, match, **arguments):
            exporter = ModelExporter(tmp_path / "out")
            with unchanged(model), pytest.raises(error, match=match):
                getattr(exporter, request.param)(model, **arguments)
            assert not list(tmp_path.iterdir())

        return refused

    def test_a_float_model(self, build, refused):
        refused(build(), ValueError, r"no quantized module: call ModelQuantizer\.quantize_model")

    def test_a_model_that_is_not_frozen(self, build, config_of, refused):
        model = ModelQuantizer(config_of("int8_wo")).quantize_model(build())
        refused(
            model,
            ValueError,
            r"layers\.0\.self_attn\.q_proj and 13 more modules are not frozen: call .*freeze",
        )

    def test_an_unknown_format(self, build, quantize, refused):
        model = quantize(build(), "int8_wo")
        refused(model, ValueError, "custom_mode: 'quarck' .*'quark'", custom_mode="quarck")

    def test_a_configuration_that_nobody_knows(self, build, quantize, refused):
        model = quantize(build(), "int8_wo")
        del model.quant_config
        refused(model, ValueError, "Pass quant_config: the model does not remember")

    def test_offloaded_weights(self, build, quantize, refused):
        model = quantize(build(), "int8_wo")
        model.model.embed_tokens.to("meta")
        refused(
            model, ValueError, r"embed_tokens\.weight and 0 more tensors are on the meta device"
        )

    def test_a_full_disk_before_it_is_full(self, build, quantize, refused, monkeypatch):
        model = quantize(build(), "int8_wo")
        monkeypatch.setattr(
            files.shutil, "disk_usage", lambda path: type("usage", (), {"free": 1000})
        )
        refused(model, OSError, "1 kB free, but .* will be written: make room")

    def test_a_place_that_is_taken(self, build, quantize, tmp_path):
        model = quantize(build(), "int8_wo")
        (tmp_path / "file").write_text("kept")
        (tmp_path / "used").mkdir()
        (tmp_path / "used" / "file").write_text("kept")
        for name, message in (("file", "is a file: choose"), ("used", "already exists: choose")):
            exporter = ModelExporter(tmp_path / name)
            for write in (exporter.export_safetensors_model, exporter.export_quark_model):
                with pytest.raises(FileExistsError, match=f"{name} {message}"):
                    write(model)
        assert contents(tmp_path / "used") == {"file": b"kept"}
        assert (tmp_path / "file").read_text() == "kept"


OLD = '{"quantization_config": {}}'  # of an earlier export


class TestFailure:
    """The disk fills up in the middle of writing."""

    @pytest.fixture
    def full(self, monkeypatch):
        def fail(tensors, path, *args, **kwargs):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        def fail_to_add(writer, name, tensor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ShardWriter, "add", fail_to_add)
        monkeypatch.setattr("torch.save", fail)

    @pytest.mark.parametrize("write", ["export_safetensors_model", "export_quark_model"])
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_nothing_half_written_stays(
        self, build, quantize, tmp_path, unchanged, full, write, overwrite
    ):
        model = quantize(build(), "int8_wo")
        out = tmp_path / "out"
        if overwrite:
            out.mkdir()
            (out / "config.json").write_text(OLD)
        exporter = ModelExporter(export_dir=out, overwrite=overwrite)
        with unchanged(model), pytest.raises(OSError, match="No space left"):
            getattr(exporter, write)(model)
        assert [p.name for p in tmp_path.iterdir()] == ["out"] * overwrite
        assert not overwrite or contents(out) == {"config.json": OLD.encode()}

    def test_overwriting_replaces_everything(self, build, quantize, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "config.json").write_text(OLD)
        (out / "model-00001-of-00002.safetensors").write_text("old")
        exporter = ModelExporter(export_dir=out, overwrite=True)
        exporter.export_safetensors_model(quantize(build(), "int8_wo"))
        names = {"config.json", "generation_config.json", "model.safetensors"}
        assert {file.name for file in out.iterdir()} == {*names, DIGESTS}


class TestSideEffects:
    @pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
    @pytest.mark.parametrize("name", ["tied", "opt"])
    def test_the_model_is_not_changed(
        self, build, quantize, export, config_of, logits, unchanged, name, weight_format
    ):
        model = quantize(build(name), config_of("int8", exclude=[]))
        before, config = logits(model), model.config.to_dict()
        with unchanged(model):
            first = export(model, weight_format=weight_format)
            second = export(model, weight_format=weight_format)
        assert contents(first) == contents(second)
        assert model.config.to_dict() == config
        assert torch.equal(logits(model), before)

    def test_only_files_of_the_model_are_written(self, build, quantize, export, tmp_path):
        from transformers import AutoModelForCausalLM

        source = tmp_path / "source"
        build().save_pretrained(source)
        (source / "private_corpus.txt").write_text("secret")
        model = quantize(AutoModelForCausalLM.from_pretrained(source), "int8_wo")
        written = contents(export(model))
        assert set(written) == {"config.json", "generation_config.json", "model.safetensors"}
        assert str(tmp_path) not in written["config.json"].decode()

    def test_a_tokenizer_goes_along(self, build, quantize, export):
        from transformers import AutoTokenizer

        from quark.demo.text import model_directory

        tokenizer = AutoTokenizer.from_pretrained(model_directory())
        path = export(quantize(build(), "int8_wo"), tokenizer=tokenizer)
        assert AutoTokenizer.from_pretrained(path).encode("a b") == tokenizer.encode("a b")


class TestConfigJson:
    def test_the_section(self, build, quantize, export, config_of):
        model = quantize(build(), config_of("int8", ["lm_head", "*down_proj"]))
        section = json_of(export(model, pack_method="order"))["quantization_config"]
        assert set(section) == {
            "algo_config",
            "exclude",
            "export",
            "global_quant_config",
            "kv_cache_post_rope",
            "kv_cache_quant_config",
            "layer_quant_config",
            "layer_type_quant_config",
            "quant_method",
            "quant_mode",
            "softmax_quant_spec",
            "version",
        }
        assert section["quant_method"] == "quark" and section["version"] == __version__
        # names in full, for readers that know no wildcards
        downs = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
        assert section["exclude"] == ["lm_head", *downs]
        assert section["export"] == {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "order",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        }
        assert section["global_quant_config"]["weight"]["dtype"] == "int8"

    def test_a_cache(self, build, quantize, export, config_of):
        from quark.torch.quantization.config.kv_cache import with_kv_cache

        config = with_kv_cache(config_of("fp8"), ["*k_proj", "*v_proj"], "fp8", 0.25)
        section = json_of(export(quantize(build(), config)))["quantization_config"]
        assert section["export"]["kv_cache_group"] == ["*k_proj", "*v_proj"]
        assert section["export"]["min_kv_scale"] == 0.25
        for pattern in ("*k_proj", "*v_proj"):
            layer = section["layer_quant_config"][pattern]
            assert layer == section["kv_cache_quant_config"][pattern]
            assert layer["output_tensors"]["dtype"] == "fp8_e4m3"

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_the_type_is_that_of_the_model(self, build, quantize, export, dtype):
        model = quantize(build(dtype=dtype), "int8_wo")
        model.config.dtype = None  # as in a model that was made and then converted
        assert json_of(export(model))["dtype"] == str(dtype).removeprefix("torch.")

    @pytest.mark.parametrize(
        ("name", "exclude", "tied"),
        [
            ("tied", ["lm_head"], True),
            ("tied", [], False),
            ("llama", [], False),
            ("opt", [], False),
        ],
    )
    def test_whether_embeddings_are_tied(
        self, build, quantize, export, config_of, name, exclude, tied
    ):
        path = export(quantize(build(name), config_of("int8_wo", exclude)))
        assert json_of(path)["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in tensors_of(path)) is not tied

    def test_a_head_whose_weight_stays_tied(self, build, quantize, export, config_of, batches):
        head = QuantizationConfig(input_tensors=FP8)
        config = config_of("fp8_wo", [], layer_quant_config={"lm_head": head})
        path = export(quantize(build("tied"), config))
        assert json_of(path)["tie_word_embeddings"] is True
        stored = tensors_of(path)
        assert "lm_head.input_scale" in stored and "lm_head.weight" not in stored

    def test_a_module_without_a_configuration(self, quantize, export):
        model = quantize(nn.Sequential(nn.Linear(64, 8)), "int8_wo")
        path = export(model)
        assert set(contents(path)) == {"config.json", "model.safetensors"}
        assert json_of(path)["architectures"] == ["Sequential"]


class TestTensors:
    @pytest.mark.parametrize("name", ["int8", "fp8", "w_fp8_a_fp8_o_fp8"])
    def test_scales_per_tensor_have_no_axes(self, build, quantize, export, name):
        stored = tensors_of(export(quantize(build(), name)))
        scales = {k: t for k, t in stored.items() if k.endswith(("_scale", "_zero_point"))}
        tensors = 3 if name.endswith("o_fp8") else 2
        assert len(scales) == 14 * tensors * (2 if name == "int8" else 1)
        assert {t.shape for t in scales.values()} == {torch.Size([])}

    def test_sizes(self, build, quantize, export):
        """Weights take the bits of their format: nothing is stored unpacked."""
        weights = sum(p.numel() for n, p in build().named_parameters() if "_proj" in n)
        plain = size_of(build().state_dict()) - 4 * weights
        for name, bits in {"int2_wo_32": 2, "int3_wo_32": 3, "int4_wo_32": 4, "fp8_wo": 8}.items():
            stored = tensors_of(export(quantize(build(), name)))
            scales = {k: t for k, t in stored.items() if "_scale" in k or "_zero_point" in k}
            assert size_of(stored) - size_of(scales) == plain + weights * bits / 8
            assert size_of(scales) < weights * (4 + 4) / 32 + 1  # per group of 32

    def test_a_shared_module_is_stored_once(self, quantize, export):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(32, 32)
                self.again = self.first

            def forward(self, x):
                return self.again(self.first(x))

        stored = tensors_of(export(quantize(Shared(), "fp8_wo")))
        assert set(stored) == {"first.weight", "first.weight_scale", "first.bias"}

    def test_tied_parameters_are_stored_once(self, quantize, export):
        model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(8, 32), nn.Embedding(8, 32))
        model[2].weight = model[1].weight
        stored = tensors_of(export(quantize(model, "fp8_wo")))
        assert set(stored) == {"0.weight", "0.weight_scale", "0.bias", "1.weight"}


def exporter(path, **options):
    return ModelExporter(ExporterConfig(JsonExporterConfig(**options)), path)


class TestMergedScales:
    def test_weights_of_fused_layers(self, build, quantize, tmp_path, caplog, unchanged):
        model = quantize(build(), "w_fp8_a_fp8")
        own = {n: m.weight_quantizer.scale for n, m in model.named_modules() if n.endswith("_proj")}
        with unchanged(model), caplog.at_level(logging.WARNING, logger="quark"):
            exporter(tmp_path / "x", weight_merge_groups=FUSED).export_safetensors_model(model)
        assert "are merged by the export, so the checkpoint differs slightly" in caplog.text
        stored = tensors_of(tmp_path / "x")
        for layer in range(2):
            for parent, group in zip(("self_attn", "mlp"), FUSED, strict=True):
                names = [f"model.layers.{layer}.{parent}.{p.strip('*')}" for p in group]
                widest = max(own[name] for name in names)
                assert [stored[f"{n}.weight_scale"] for n in names] == [widest] * len(names)
                for name in names:
                    value = stored[f"{name}.weight"].float() * widest
                    # at most half a step of the coarser grid away: 2^-4 of a value, near zero 2^-10
                    off = (value - model.get_submodule(name).weight).abs()
                    assert (off <= value.abs() * 2**-4 + widest * 2**-10).all()

    def test_weights_merged_in_quantization_stay_as_they_are(
        self, build, quantize, config_of, tmp_path, caplog
    ):
        config = config_of("w_fp8_a_fp8", shared_scale_groups=FUSED)
        model = quantize(build(), config)
        with caplog.at_level(logging.WARNING, logger="quark"):
            exporter(tmp_path / "merged", weight_merge_groups=FUSED).export_safetensors_model(model)
            exporter(tmp_path / "plain").export_safetensors_model(model)
        assert not caplog.records
        name = "model.safetensors"
        merged, plain = contents(tmp_path / "merged"), contents(tmp_path / "plain")
        assert merged[name] == plain[name]

    @pytest.mark.parametrize("spec", [INT8, FP8], ids=["int8", "fp8"])
    def test_a_cache_that_only_the_export_knows_of(self, build, quantize, tmp_path, caplog, spec):
        """Versions before 0.10 named the group in the options of the export."""
        layer = QuantizationConfig(weight=INT8, output_tensors=spec)
        config = Config(scheme("int8_wo"), layer_quant_config={"*k_proj": layer, "*v_proj": layer})
        model = quantize(build(), config)
        own = {
            n: m.output_quantizer.scale
            for n, m in model.named_modules()
            if n.endswith(("k_proj", "v_proj"))
        }
        floor = sorted(own.values())[-1].item() * 0.999
        with caplog.at_level(logging.WARNING, logger="quark"):
            exporter(
                tmp_path / "x", kv_cache_group=["*k_proj", "*v_proj"], min_kv_scale=floor
            ).export_safetensors_model(model)
        assert "merged by the export" in caplog.text
        stored = tensors_of(tmp_path / "x")
        for layer in range(2):
            names = [f"model.layers.{layer}.self_attn.{p}_proj" for p in "kv"]
            expected = max(floor, max(own[n].item() for n in names))
            for name in names:
                scale = stored[f"{name}.output_scale"]
                assert scale.shape == () and scale.item() == pytest.approx(expected)
