"""Parameters beside a description of the model's structure."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import quark
from quark.torch import (
    ModelExporter,
    ModelQuantizer,
    import_model_from_safetensors,
    load_params,
    save_params,
)
from quark.torch.digests import DIGESTS
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme


def files(path, name="llama"):
    return {"json_path": path / f"{name}.json", "safetensors_path": path / f"{name}.safetensors"}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["int8", "w_uint4_per_group_asym", "ptpc_fp8", "bfloat16"])
@pytest.mark.sampled(3)
def test_reload(build, quantize, config_of, logits, tmp_path, unchanged, scheme, dtype, compressed):
    for name, exclude in (("llama", ["lm_head"]), ("opt", []), ("tied", ["*down_proj", "lm_head"])):
        model = quantize(build(name, dtype=dtype), config_of(scheme, exclude))
        path = tmp_path / name
        with unchanged(model):
            save_params(model, name, export_dir=path, compressed=compressed)
        assert {p.name for p in path.iterdir()} == {DIGESTS, f"{name}.json", f"{name}.safetensors"}
        for device in ("cpu", "meta"):
            found = load_params(
                build(name, device=device, dtype=dtype), **files(path, name), compressed=compressed
            )
            assert torch.equal(logits(found), logits(model)), (name, device)


def test_the_model_is_built_where_none_is_given(build, quantize, logits, tmp_path):
    model = quantize(build("tied"), "int8")
    save_params(model, "llama", export_dir=tmp_path / "x")
    found = load_params(**files(tmp_path / "x"))
    torch.testing.assert_close(logits(found), logits(model))


def test_word_order_of_packed_codes(build, quantize, logits, tmp_path):
    model = quantize(build(), "uint4_wo_32")
    stored = []
    for reorder in (True, False):
        path = tmp_path / str(reorder)
        save_params(model, "llama", export_dir=path, compressed=True, reorder=reorder)
        stored.append(load_file(path / "llama.safetensors")["model.layers.0.mlp.up_proj.weight"])
        found = load_params(build(), **files(path), compressed=True, reorder=reorder)
        assert torch.equal(logits(found), logits(model))
        other = load_params(build(), **files(path), compressed=True, reorder=not reorder)
        assert torch.equal(logits(other), logits(model))  # the order in the file is used
    assert not stored[0].equal(stored[1])


def test_word_order_of_files_that_do_not_record_it(build, quantize, logits, tmp_path):
    """Files of earlier versions, and of AMD Quark, leave it to the caller."""
    model = quantize(build(), "uint4_wo_32")
    for reorder in (True, False):
        path = tmp_path / str(reorder)
        save_params(model, "llama", export_dir=path, compressed=True, reorder=reorder)
        described = json.loads((path / "llama.json").read_text())
        assert described.pop("pack_method") == ("reorder" if reorder else "order")
        (path / "llama.json").write_text(json.dumps(described))
        found = load_params(build(), **files(path), compressed=True, reorder=reorder)
        assert torch.equal(logits(found), logits(model))
        if reorder:  # the default
            found = load_params(build(), **files(path), compressed=True)
            assert torch.equal(logits(found), logits(model))


@pytest.mark.parametrize("order", ["backwards", 3, None])
def test_an_unknown_word_order_is_refused(build, quantize, unchanged, tmp_path, order):
    save_params(
        quantize(build(), "uint4_wo_32"), "llama", export_dir=tmp_path / "x", compressed=True
    )
    paths = files(tmp_path / "x")
    described = json.loads(paths["json_path"].read_text())
    paths["json_path"].write_text(json.dumps({**described, "pack_method": order}))
    model = build()
    with unchanged(model), pytest.raises((TypeError, ValueError), match="pack_method"):
        load_params(model, **paths, compressed=True)


def test_float_weights_have_no_word_order(build, quantize, tmp_path):
    save_params(quantize(build(), "uint4_wo_32"), "llama", export_dir=tmp_path / "x")
    assert "pack_method" not in json.loads((tmp_path / "x" / "llama.json").read_text())


@pytest.mark.parametrize("version", [None, "0.13"])
def test_codes_of_two_bits_in_files_before_1_0(quantize, tmp_path, version):
    """They had no version at first, and one code in each 32-bit word."""
    model, x = quantize(nn.Sequential(nn.Linear(64, 32)), "int2_wo_32"), torch.randn(2, 64)
    save_params(model, "net", export_dir=tmp_path / "x", compressed=True)
    paths = files(tmp_path / "x", "net")
    described = json.loads(paths["json_path"].read_text())
    del described["version"]
    if version is not None:
        described["version"] = version
    paths["json_path"].write_text(json.dumps(described))
    tensors = load_file(paths["safetensors_path"])
    for name in ("0.weight", "0.weight_zero_point"):
        codes = torch.stack([tensors[name] >> shift & 3 for shift in (6, 4, 2, 0)], -1).flatten(1)
        tensors[name] = codes.int() - (codes > 1).int() * 4  # two's complement
    save_file(tensors, paths["safetensors_path"])
    found = load_params(nn.Sequential(nn.Linear(64, 32)), **paths, compressed=True)
    assert torch.equal(found(x), model(x))


def test_names_with_the_characters_of_patterns(quantize, tmp_path):
    def build():
        return nn.ModuleDict(
            {"a[0]": nn.Linear(64, 32), "a0": nn.Linear(32, 8), "b*": nn.Linear(8, 8)}
        )

    model = build()
    config = Config(layer_quant_config={"a0": scheme("int8_wo"), "*]": scheme("int4_wo_32")})
    model = quantize(model, config)
    save_params(model, "net", export_dir=tmp_path / "x", compressed=True)
    found = load_params(build(), **files(tmp_path / "x", "net"), compressed=True)
    for name in model:
        x_in = torch.randn(2, model[name].in_features)
        assert torch.equal(found[name](x_in), model[name](x_in)), name
    assert type(found["b*"]) is nn.Linear


def test_the_description(build, quantize, tmp_path):
    save_params(quantize(build("opt"), "int8"), "opt", export_dir=tmp_path / "x")
    described = json.loads((tmp_path / "x" / "opt.json").read_text())
    assert described["version"] == quark.__version__
    assert described["config"]["hidden_size"] == 64
    structure = described["structure"]["model"]["decoder"]
    layer = structure["layers"]["0"]["fc1"]
    assert layer["name"] == "model.decoder.layers.0.fc1" and layer["type"] == "QuantLinear"
    assert layer["weight"] == "model.decoder.layers.0.fc1.weight"
    assert layer["bias"] == "model.decoder.layers.0.fc1.bias"
    assert layer["weight_quant"]["dtype"] == layer["input_quant"]["dtype"] == "int8"
    assert "output_quant" not in layer
    norm = structure["layers"]["0"]["final_layer_norm"]
    assert set(norm) == {"name", "type", "weight", "bias"}


class TestBadInput:
    @pytest.fixture
    def path(self, build, quantize, tmp_path):
        save_params(quantize(build(), "int8"), "llama", export_dir=tmp_path / "x")
        return tmp_path / "x"

    def test_whole_pickled_models(self, path, build, tmp_path):
        with pytest.raises(ValueError, match=r"pickled models can run code .* Give json_path"):
            load_params(build(), pth_path=tmp_path / "model.pth")

    @pytest.mark.parametrize("missing", ["llama.json", "llama.safetensors"])
    def test_a_missing_file(self, path, build, unchanged, missing):
        (path / missing).unlink()
        model = build()
        with unchanged(model), pytest.raises(FileNotFoundError, match=f"{missing} does not exist"):
            load_params(model, **files(path))

    @pytest.mark.parametrize("content", ["{", "{}", "[]", '{"structure": 3}'])
    def test_a_damaged_description(self, path, build, unchanged, content):
        (path / "llama.json").write_text(content)
        model = build()
        with unchanged(model), pytest.raises(ValueError, match=r"llama\.json"):
            load_params(model, **files(path))

    def test_damaged_tensors(self, path, build, unchanged):
        (path / "llama.safetensors").write_bytes(b"text")
        model = build()
        with unchanged(model), pytest.raises(ValueError, match="damaged or not a safetensors file"):
            load_params(model, **files(path))

    def test_another_kind_of_weights(self, path, build, unchanged):
        model = build()
        with unchanged(model), pytest.raises(ValueError, match="does not fit LlamaForCausalLM"):
            load_params(model, **files(path), compressed=True)

    def test_another_architecture(self, path, build, unchanged):
        model = build("opt")
        with unchanged(model), pytest.raises(ValueError, match="none of the 14 layers"):
            load_params(model, **files(path))

    def test_saving_what_is_not_ready(self, build, config_of, tmp_path):
        with pytest.raises(ValueError, match="no quantized module"):
            save_params(build(), "llama", export_dir=tmp_path / "y")
        model = ModelQuantizer(config_of("int8_wo")).quantize_model(build())
        with pytest.raises(ValueError, match="not frozen"):
            save_params(model, "llama", export_dir=tmp_path / "y")
        with pytest.raises(ValueError, match="Give export_dir"):
            save_params(ModelQuantizer.freeze(model), "llama")
        assert not (tmp_path / "y").exists()

    def test_a_place_that_is_taken(self, path, build, quantize):
        model = quantize(build(), "int8_wo")
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            save_params(model, "llama", export_dir=path)
        save_params(model, "other", export_dir=path, overwrite=True)
        assert {p.name for p in path.iterdir()} == {DIGESTS, "other.json", "other.safetensors"}


def test_any_module(quantize, tmp_path):
    model, x = quantize(nn.Sequential(nn.Linear(32, 8)), "int8_wo"), torch.randn(2, 32)
    save_params(model, "net", export_dir=tmp_path / "x")
    found = load_params(nn.Sequential(nn.Linear(32, 8)), **files(tmp_path / "x", "net"))
    assert torch.equal(found(x), model(x))
    with pytest.raises(ValueError, match="names no architecture: pass the model to fill"):
        load_params(**files(tmp_path / "x", "net"))


def test_a_model_that_is_read_in_parts_is_refused(build, config_of, tmp_path):
    build().save_pretrained(tmp_path / "float")
    model = stream_model(tmp_path / "float", 1 << 40)
    ModelQuantizer.freeze(ModelQuantizer(config_of("int8_wo")).quantize_model(model))
    with pytest.raises(ValueError, match=r"read in parts.*--max_memory"):
        save_params(model, "llama", export_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["compressed", "reorder", "overwrite"])
def test_flags_are_true_or_false(name, tmp_path):
    """A text would turn on what it names, such as the replacement of a directory."""
    with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
        save_params(nn.Linear(2, 2), "net", export_dir=tmp_path, **{name: "no"})
    if name != "overwrite":
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
            load_params(None, tmp_path / "a.json", tmp_path / "a.safetensors", **{name: "no"})


def test_exports_do_not_take_a_text_for_a_flag(tmp_path):
    for name in ("overwrite", "verify"):
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
            ModelExporter(export_dir=tmp_path, **{name: "no"})
    with pytest.raises(TypeError, match="trust_remote_code: expected True or False, got 'no'"):
        import_model_from_safetensors(None, tmp_path, trust_remote_code="no")
