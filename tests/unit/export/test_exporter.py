"""Out to a directory and back: what is reloaded computes what the frozen model computes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import (
    ModelExporter,
    ModelImporter,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    Uint4PerGroupSpec,
)

# One scheme of each kind: format, granularity, symmetry; static and dynamic inputs, outputs.
SCHEMES = [
    "int8",
    "w_int8_per_tensor_sym",
    "w_int8_per_channel_a_int8_per_tensor_sym_dynamic",
    "ptpc_int8",
    "int8_wo_32",
    "w_uint8_a_uint8_per_tensor_asym",
    "w_uint8_per_group_asym",
    "int4_wo_per_channel",
    "int4_wa_32",
    "w_uint4_per_channel_asym",
    "w_uint4_per_group_sym",
    "w_uint4_a_bfloat16_per_group_asym",
    "int3_wo_32",
    "int3_wo_per_channel",
    "w_int2_per_group_asym",
    "w_fp8_a_fp8_o_fp8",
    "fp8_wo",
    "ptpc_fp8",
    "bfloat16",
    "float16",
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["real_quantized", "fake_quantized"]


def read(path, model, saved_format="safetensors"):
    return ModelImporter(path, saved_format).import_model_info(model)


def exporter(path, **options):
    return ModelExporter(ExporterConfig(JsonExporterConfig(**options)), path)


class TestReload:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", SCHEMES)
    @pytest.mark.sampled(8)
    def test_bit_for_bit(self, build, quantize, export, config_of, logits, name, dtype):
        """With grouped heads; with biases and tied embeddings, the head quantized."""
        for kind, exclude in (("llama", ["lm_head"]), ("opt", [])):
            model = quantize(build(kind, dtype=dtype), config_of(name, exclude))
            frozen = logits(model)
            for weight_format in FORMATS:
                path = export(model, weight_format=weight_format)
                for device in ("meta", "cpu"):
                    found = read(path, build(kind, dtype=dtype, device=device))
                    assert torch.equal(logits(found), frozen), (kind, weight_format, device)

    @pytest.mark.parametrize("scale_type", ["float16", "bfloat16"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.sampled(3)
    def test_scales_of_half_precision(self, build, quantize, export, logits, scale_type, dtype):
        """They are rounded before they are used, so nothing is lost."""
        for spec in (
            Int8PerTensorSpec(scale_type=scale_type),
            FP8E4M3PerTensorSpec(scale_type=scale_type),
            Uint4PerGroupSpec(ch_axis=-1, group_size=32, scale_type=scale_type),
        ):
            weight = spec.to_quantization_spec()
            model = quantize(build(dtype=dtype), Config(QuantizationConfig(weight=weight)))
            for weight_format in FORMATS:
                found = read(export(model, weight_format=weight_format), build(device="meta"))
                scale = found.lm_head.weight_quantizer.scale
                assert scale.dtype == getattr(torch, scale_type)
                assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("round_method", ["floor", "round"])
    def test_other_ways_to_round(self, build, quantize, export, logits, round_method):
        for spec in (
            Int8PerChannelSpec(ch_axis=0, symmetric=True, round_method=round_method),
            Uint4PerGroupSpec(ch_axis=-1, group_size=32, round_method=round_method),
        ):
            layer = QuantizationConfig(weight=spec.to_quantization_spec())
            model = quantize(build("opt"), Config(layer))
            for weight_format in FORMATS:
                found = read(export(model, weight_format=weight_format), build("opt"))
                assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("zero_point_type", ["int32", "float32"])
    def test_zero_points(self, build, quantize, export, logits, zero_point_type):
        spec = Uint4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
        spec = replace(spec, zero_point_type=zero_point_type)
        model = quantize(build(), Config(QuantizationConfig(weight=spec)))
        for weight_format in FORMATS:
            found = read(export(model, weight_format=weight_format), build(device="meta"))
            assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("weight_format", FORMATS)
    def test_biases(self, build, quantize, export, logits, weight_format):
        int8 = Int8PerTensorSpec().to_quantization_spec()
        layer = QuantizationConfig(weight=int8, bias=int8)
        model = quantize(build("opt"), Config(layer, exclude=["lm_head"]))
        plain = quantize(build("opt"), Config(QuantizationConfig(weight=int8), exclude=["lm_head"]))
        assert not torch.equal(logits(model), logits(plain))
        found = read(export(model, weight_format=weight_format), build("opt", device="meta"))
        layer = found.model.decoder.layers[0].fc1
        stored = layer.state_dict()["bias"].dtype
        assert stored == (torch.int8 if weight_format == FORMATS[0] else torch.float32)
        assert torch.equal(logits(found), logits(model))

    def test_groups_that_pad(self, quantize, export):
        spec = FP8E4M3PerTensorSpec().to_quantization_spec()
        spec = replace(spec, qscheme="per_group", ch_axis=-1, group_size=32)
        model = quantize(nn.Sequential(nn.Linear(40, 7)), Config(QuantizationConfig(weight=spec)))
        x, path = torch.randn(3, 40), export(model)
        found = read(path, nn.Sequential(nn.Linear(40, 7, device="meta")))
        assert found[0].weight_quantizer.scale.shape == (7, 2)
        assert torch.equal(found(x), model(x))

    def test_any_module(self, quantize, export, config_of):
        def make():
            return nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))

        x = torch.randn(6, 64)
        model = quantize(make(), config_of("int8"), [x])
        path = export(model)
        for device in ("cpu", "meta"):
            with torch.device(device):
                found = make()
            assert torch.equal(read(path, found)(x), model(x))


class TestShards:
    def test_above_a_size(self, build, quantize, tmp_path, logits):
        model = quantize(build("opt"), "int8")
        path = tmp_path / "sharded"
        ModelExporter(path).export_safetensors_model(model, max_shard_size="40KB")
        shards = sorted(p.name for p in path.glob("*.safetensors"))
        assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(shards)
        assert torch.equal(logits(read(path, build("opt", device="meta"))), logits(model))


class TestAgain:
    """Export of a model that was imported."""

    @pytest.mark.parametrize("name", ["int8", "w_uint4_per_group_asym", "fp8", "bfloat16"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_same_files(self, build, quantize, export, config_of, logits, name, dtype):
        model = quantize(build("opt", dtype=dtype), config_of(name, []))
        first = export(model)
        again = export(read(first, build("opt", dtype=dtype, device="meta")))
        for file in first.iterdir():
            assert (again / file.name).read_bytes() == file.read_bytes()

    @pytest.mark.parametrize("first", FORMATS)
    @pytest.mark.parametrize("second", FORMATS)
    def test_another_weight_format(self, build, quantize, export, logits, first, second):
        model = quantize(build(), "w_uint4_per_group_asym")
        found = read(export(model, weight_format=first), build(device="meta"))
        path = export(found, weight_format=second)
        assert torch.equal(logits(read(path, build(device="meta"))), logits(model))


class TestNativeFormat:
    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("name", ["int8", "uint4_wo_32", "bfloat16"])
    def test_reload(self, build, quantize, tmp_path, logits, name, weight_format):
        model = quantize(build("opt"), name)
        for pack_method in ("reorder", "order"):
            path = tmp_path / pack_method
            options = {"weight_format": weight_format, "pack_method": pack_method}
            exporter(path, **options).export_quark_model(model)
            found = read(path, build("opt", device="meta"), "quark_format")
            assert torch.equal(logits(found), logits(model))

    def test_the_same_tensors_as_safetensors(self, build, quantize, export, tmp_path):
        from safetensors.torch import load_file

        model = quantize(build(), "int4_wo_32")
        exporter(tmp_path / "native").export_quark_model(model)
        native = torch.load(tmp_path / "native" / "model_state_dict.pth", weights_only=True)
        stored = load_file(export(model) / "model.safetensors")
        assert native.keys() == stored.keys()
        assert all(native[name].equal(stored[name]) for name in stored)
        # a view would drag the whole tensor along
        size = (tmp_path / "native" / "model_state_dict.pth").stat().st_size
        assert size < 1.5 * sum(t.numel() * t.itemsize for t in stored.values())

    def test_which_file_is_read(self, build, quantize, tmp_path, export):
        """The native file by default where there is one, safetensors if asked for or alone."""
        path = export(quantize(build(), "int8"))
        assert torch.equal(
            read(path, build(), "quark_format").model.norm.weight, build().model.norm.weight
        )
        other = build()
        nn.init.constant_(other.model.norm.weight, 2)
        exporter(tmp_path / "native").export_quark_model(quantize(other, "int8"))
        (tmp_path / "native" / "model_state_dict.pth").rename(path / "model_state_dict.pth")
        found = {f: read(path, build(), f) for f in ("quark_format", "safetensors", "hf_format")}
        norms = {f: m.model.norm.weight[0].item() for f, m in found.items()}
        assert norms == {"quark_format": 2.0, "safetensors": 1.0, "hf_format": 1.0}


class TestArguments:
    def test_exporter(self, tmp_path):
        options = JsonExporterConfig(pack_method="order")
        for made in (
            ModelExporter(tmp_path),
            ModelExporter(str(tmp_path)),
            ModelExporter(export_dir=tmp_path),
            ModelExporter(options, tmp_path),
            ModelExporter(config=ExporterConfig(json_export_config=options), export_dir=tmp_path),
        ):
            assert made.export_dir == tmp_path
        assert made.config.json_export_config is options
        for missing in ({}, {"config": ExporterConfig()}):
            with pytest.raises(ValueError, match="Give export_dir, the directory to write"):
                ModelExporter(**missing)

    def test_importer(self, tmp_path):
        with pytest.raises(ValueError, match="saved_format='gguf' is unknown: give safetensors"):
            ModelImporter(tmp_path, saved_format="gguf")
        with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
            ModelImporter(tmp_path / "nowhere")

    def test_options(self):
        with pytest.raises(ValueError, match=r"pack_method: 'reorderd' .* mean 'reorder'\?"):
            JsonExporterConfig(pack_method="reorderd")
        with pytest.raises(ValueError, match="weight_format: 'packed' is unknown"):
            export_safetensors(nn.Linear(2, 2), "unused", weight_format="packed")

    def test_a_model_is_built_where_none_is_given(self, build, quantize, export, logits):
        model = quantize(build("tied", dtype=torch.bfloat16), "int8")
        path = export(model)
        for device in ("cpu", "cuda"):  # falls back to the CPU where there is no GPU
            found = import_model_from_safetensors(
                None, path, attn_implementation="sdpa", device=device
            )
            assert found.dtype == torch.bfloat16 and not hasattr(
                found.config, "quantization_config"
            )
            assert torch.equal(logits(found).cpu(), logits(model)) or found.device.type == "cuda"
        given = build("tied")
        assert import_model_from_safetensors(given, path) is given

    def test_the_configuration_may_be_given(self, build, quantize, tmp_path, config_of):
        config = config_of("int8_wo")
        model = quantize(build(), config)
        del model.quant_config
        ModelExporter(tmp_path / "x").export_safetensors_model(model, quant_config=config)
        assert read(tmp_path / "x", build()).quant_config.global_quant_config == (
            config.global_quant_config
        )
