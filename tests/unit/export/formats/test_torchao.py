"""Checkpoints of torchao: stored values by its definition, and what headers of files describe."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.recognition import load_checkpoint, open_checkpoint, read_contents
from quark.torch.quantization.config.config import QuantizationConfig
from tests.configurations import config, groups, preset, spec

LAYER = "model.layers.1.mlp.up_proj"
TOKENS = spec("int8", "per_channel", symmetric=False, ch_axis=1, is_dynamic=True)


@pytest.fixture
def written(build, quantize, tmp_path):
    def written(configuration, kind="llama", **options):
        model = quantize(build(kind), configuration, None)
        exporter = ModelExporter(tmp_path / "ao")
        exporter.export_safetensors_model(model, custom_mode="torchao", **options)
        return model, tmp_path / "ao"

    return written


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def edited(path, change):
    """Change the metadata of a weight in a file."""
    file = path / "model.safetensors"
    texts = metadata_of(file)
    described = json.loads(texts[f"{LAYER}.weight"])
    change(described)
    save_file(load_file(file), file, {**texts, f"{LAYER}.weight": json.dumps(described)})


def section_of(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


class TestWritten:
    @pytest.mark.parametrize("dtype", ["int2", "int3", "int4", "uint4", "int5", "int7", "int8"])
    @pytest.mark.parametrize("size", [32, None])
    def test_values(self, written, dtype, size):
        model, path = written(config(groups(dtype, not dtype.startswith("u"), size)))
        stored = load_file(path / "model.safetensors")
        parts = ("qdata", "scale", "zero_point")
        codes, scale, zeros = (stored[f"{LAYER}._weight_{part}"] for part in parts)
        assert codes.dtype == zeros.dtype == torch.int8 and codes.shape == (96, 64)
        assert scale.shape == zeros.shape == (96, 64 // (size or 64))
        described = json.loads(metadata_of(path / "model.safetensors")[f"{LAYER}.weight"])
        assert described["_data"]["block_size"] == [1, size or 64]
        assert described["_data"]["dtype"] == {"_type": "torch.dtype", "_data": "float32"}
        if dtype != "int8":
            assert described["_data"]["target_dtype"]["_data"] == dtype.removeprefix("u")
        blocks = codes.reshape(96, -1, size or 64).float() - zeros.float().unsqueeze(-1)
        values = (blocks * scale.unsqueeze(-1)).flatten(1)
        assert values.equal(model.get_submodule(LAYER).weight)

    @pytest.mark.parametrize(
        ("configuration", "kind", "made_by"),
        [
            (preset("int8_wo"), "Int8Tensor", "Int8WeightOnlyConfig"),
            (preset("ptpc_int8"), "Int8Tensor", "Int8DynamicActivationInt8WeightConfig"),
            (preset("fp8_wo"), "Float8Tensor", "Float8WeightOnlyConfig"),
            (preset("ptpc_fp8"), "Float8Tensor", "Float8DynamicActivationFloat8WeightConfig"),
            (preset("int4_wo_32"), "IntxUnpackedToInt8Tensor", "IntxWeightOnlyConfig"),
            (
                config(groups("int4"), TOKENS),
                "IntxUnpackedToInt8Tensor",
                "Int8DynamicActivationIntxWeightConfig",
            ),
            (config(groups("uint8", False)), "IntxUnpackedToInt8Tensor", "IntxWeightOnlyConfig"),
        ],
    )
    def test_read_again(self, written, logits, configuration, kind, made_by):
        model, path = written(configuration)
        texts = metadata_of(path / "model.safetensors")
        assert json.loads(texts[f"{LAYER}.weight"])["_type"] == kind
        assert json.loads(texts["lm_head.weight"]) == {"_type": "Tensor"}
        assert section_of(path)["quant_type"]["default"]["_type"] == made_by
        loaded = load_checkpoint(path)
        assert logits(loaded).equal(logits(model))
        asked, found = (m.get_submodule(LAYER).quant_config for m in (model, loaded))
        inputs = [c.input_tensors and c.input_tensors.scheme for c in (asked, found)]
        assert inputs[0] == inputs[1]

    @pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float16"])
    def test_types_of_scales(self, written, logits, scale_type):
        model, path = written(config(groups("int4", scale_type=scale_type)))
        scale = load_file(path / "model.safetensors")[f"{LAYER}._weight_scale"]
        assert scale.dtype == getattr(torch, scale_type)
        assert logits(load_checkpoint(path)).equal(logits(model))

    def test_several_schemes(self, written, logits):
        others = {"*down_proj": preset("ptpc_fp8").global_quant_config}
        model, path = written(config(groups("int4"), layer_quant_config=others))
        section = section_of(path)
        given = section["quant_type"]["default"]
        assert given["_type"] == "FqnToConfig"
        kinds = {n: v["_type"] for n, v in given["_data"]["fqn_to_config"].items()}
        assert len(kinds) == 14
        for name, kind in kinds.items():
            fp8 = name.endswith("down_proj")
            assert kind == (
                "Float8DynamicActivationFloat8WeightConfig" if fp8 else "IntxWeightOnlyConfig"
            )
        assert section["modules_to_not_convert"] == ["lm_head"]
        assert logits(load_checkpoint(path)).equal(logits(model))
        words = read_contents(path).summary.scheme_words()
        assert "int4" in words and "fp8_e4m3" in words

    def test_every_file_describes_every_tensor(self, written, logits):
        model, path = written(preset("int8_wo"), max_shard_size=40_000)
        files = sorted(path.glob("*.safetensors"))
        assert len(files) > 2
        texts = [metadata_of(file) for file in files]
        assert all(text == texts[0] for text in texts)
        names = json.loads(texts[0]["tensor_names"])
        assert set(names) == set(texts[0]) - {"tensor_names", "format"}
        assert set(names) == set(model.state_dict()) - {
            n for n in model.state_dict() if "quantizer" in n
        }
        assert logits(load_checkpoint(path)).equal(logits(model))

    @pytest.mark.parametrize(
        ("configuration", "said"),
        [
            (preset("mxfp4"), "its weight is fp4"),
            (config(spec("int8")), "its weight has scales per_tensor"),
            (config(groups("int4"), spec("int8", is_dynamic=True)), "its input is int8 per_tensor"),
            (config(groups("int4"), preset("ptpc_fp8").global_quant_config.input_tensors), "fp8"),
            (config(groups("uint4", False, zero_point_type="float32")), "zero points are float32"),
        ],
    )
    def test_refused(self, written, configuration, said):
        with pytest.raises(ValueError, match=f"custom_mode='torchao' cannot hold .*{said}"):
            written(configuration)

    def test_experts(self, written):
        layers = {"*.experts.*": QuantizationConfig(weight=groups("int8", size=None))}
        with pytest.raises(ValueError, match=r"cannot hold the experts of .*experts"):
            written(config(groups("int8", size=None), layer_quant_config=layers), "mixtral")

    def test_no_headers(self, build, quantize, tmp_path):
        model = quantize(build(), preset("int8_wo"), None)
        with pytest.raises(ValueError, match="describes tensors in headers of safetensors"):
            ModelExporter(tmp_path / "pth").export_quark_model(model, custom_mode="torchao")
        assert not (tmp_path / "pth").exists()

    def test_other_formats(self, written, tmp_path):
        """Codes pass through another format and return as they were."""
        _, path = written(config(groups("int4")))
        convert(path, tmp_path / "ct", "compressed-tensors")
        convert(tmp_path / "ct", tmp_path / "again", "torchao")
        first, again = (p / "model.safetensors" for p in (path, tmp_path / "again"))
        assert metadata_of(first) == metadata_of(again)
        one, other = load_file(first), load_file(again)
        assert one.keys() == other.keys() and all(one[n].equal(other[n]) for n in one)


def test_experts_that_are_split_are_refused(written, tmp_path):
    with pytest.raises(ValueError, match=r"cannot hold the experts of .*0\.mlp\.experts"):
        written(preset("int8_wo"), "mixtral")
    assert not (tmp_path / "ao").exists()
    _, path = written(preset("int8_wo", exclude=["lm_head", "*experts*"]), "mixtral")
    stored = load_file(path / "model.safetensors")
    assert any(key.endswith("q_proj._weight_qdata") for key in stored)


REMEDY = "Copy the checkpoint again. If it is as torchao wrote it, quantize the linear layers"


class TestRefusedFiles:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda d: d.update(_type="Int4TilePackedTo4dTensor"), "is a 'Int4TilePackedTo4dTe"),
            (lambda d: d.update(_type="os.system"), "is a 'os.system' .supported: Float8Tensor"),
            (lambda d: d.pop("_data"), "no object with _type and _data"),
            (lambda d: d["_tensor_data_names"].append("act_pre_scale"), "act_pre_scale"),
            (lambda d: d.update(_tensor_data_names=[["qdata"]]), "are not supported"),
            (lambda d: d["_data"].update(block_size=[2, 32]), r"block_size=\[2, 32\]"),
            (lambda d: d["_data"].update(block_size=[1, 0]), r"block_size=\[1, 0\]"),
            (lambda d: d["_data"].update(block_size=None), "block_size=None"),
            (lambda d: d["_data"].update(block_size=[1, 64]), "does not fit"),
            (lambda d: d["_data"].update(activation_quantization="int4"), "activation_quantiza"),
            (lambda d: d["_data"].update(target_dtype={"_data": "int4"}), "target_dtype"),
            (lambda d: d["_data"]["target_dtype"].update(_data="int2"), "outside of int2"),
        ],
    )
    def test_metadata(self, written, change, said):
        _, path = written(config(groups("int4")))
        edited(path, change)
        with pytest.raises(ValueError, match=said) as error:
            load_checkpoint(path)
        assert REMEDY in str(error.value) or said == "does not fit"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda d: d.update(reduce_range=True), "act_quant_kwargs"),
            (lambda d: d["granularity"].update(_type="PerTensor"), "act_quant_kwargs"),
            (lambda d: d.pop("granularity"), "no object with _type and _data"),
        ],
    )
    def test_inputs(self, written, change, said):
        _, path = written(preset("ptpc_int8"))
        edited(path, lambda d: change(d["_data"]["act_quant_kwargs"]["_data"]))
        with pytest.raises(ValueError, match=said):
            load_checkpoint(path)

    def test_zero_points_that_its_products_leave_out(self, written):
        _, path = written(preset("int8_wo"))
        file = path / "model.safetensors"
        stored, texts = load_file(file), metadata_of(file)
        stored[f"{LAYER}._weight_zero_point"][3] = 1
        save_file(stored, file, texts)
        with pytest.raises(ValueError, match="products of torchao leave out"):
            open_checkpoint(path)

    def test_zero_points_that_are_missing(self, written):
        _, path = written(config(groups("uint4", False)))
        file = path / "model.safetensors"
        stored, texts = load_file(file), metadata_of(file)
        del stored[f"{LAYER}._weight_zero_point"]
        save_file(stored, file, texts)
        with pytest.raises(ValueError, match="zero points are described and not stored"):
            open_checkpoint(path)

    def test_no_metadata(self, written):
        _, path = written(preset("int8_wo"))
        file = path / "model.safetensors"
        save_file(load_file(file), file, {"format": "pt"})
        with pytest.raises(ValueError, match="no header of a file describes it"):
            open_checkpoint(path)

    def test_an_embedding(self, written):
        _, path = written(preset("int8_wo"))
        file = path / "model.safetensors"
        stored, texts = load_file(file), metadata_of(file)
        name = "model.embed_tokens"
        weight = stored.pop(f"{name}.weight")
        stored[f"{name}._weight_qdata"] = weight.to(torch.int8)
        stored[f"{name}._weight_scale"] = torch.ones(len(weight), 1)
        stored[f"{name}._weight_zero_point"] = torch.zeros(len(weight), 1, dtype=torch.int8)
        save_file(stored, file, {**texts, f"{name}.weight": texts[f"{LAYER}.weight"]})
        with pytest.raises(ValueError, match=f"{name} is quantized, but is no linear layer"):
            open_checkpoint(path)

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("int8_weight_only", "has no configuration 'default'"),
            ({"default": {"_type": "UIntXWeightOnlyConfig", "_data": {}}}, "'UIntXWeightOnlyCon"),
            ({"default": {"_type": "FqnToConfig", "_data": {}}}, "fqn_to_config=None is no object"),
            (
                {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"re:a": None}}}},
                "the pattern 're:a' is not supported",
            ),
            (
                {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": None}}}},
                "quantizes nothing",
            ),
        ],
    )
    def test_section(self, written, kind, said):
        _, path = written(preset("int8_wo"))
        described = json.loads((path / "config.json").read_text())
        described["quantization_config"]["quant_type"] = kind
        (path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ValueError, match=f"quant_type: .*{said}") as error:
            open_checkpoint(path)
        assert REMEDY in str(error.value)
