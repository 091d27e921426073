"""Checkpoints of MLX: stored bits by its rules, and files as its own tools write them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.recognition import load_checkpoint, load_in_float, open_checkpoint
from quark.torch.quantization.config.config import QuantizationConfig
from tests.configurations import config, groups

LAYER = "model.layers.1.mlp.up_proj"
EMBEDDING = {"*embed_tokens": QuantizationConfig(weight=groups("uint8", False))}


def codes_of(words, bits):
    """Codes of rows of words: the bits of a row follow each other, the lowest first."""
    stream = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
    fields = stream.reshape(len(words), -1, bits).astype(np.int64)
    return torch.from_numpy((fields << np.arange(bits)).sum(-1))


def words_of(codes, bits):
    """Words of codes: the inverse of ``codes_of``."""
    fields = codes.numpy()[..., None] >> np.arange(bits) & 1
    stream = np.packbits(fields.reshape(len(codes), -1).astype(np.uint8), -1, bitorder="little")
    return torch.from_numpy(stream.view(np.uint32))


@pytest.fixture
def written(build, quantize, tmp_path):
    def written(configuration, kind="llama", **changes):
        model = quantize(build(kind, **changes), configuration, None)
        ModelExporter(tmp_path / "mlx").export_safetensors_model(model, custom_mode="mlx")
        return model, tmp_path / "mlx"

    return written


class TestWritten:
    @pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
    def test_values(self, written, bits):
        model, path = written(config(groups(f"uint{bits}", False)))
        stored = load_file(path / "model.safetensors")
        words, scales, biases = (stored[f"{LAYER}.{n}"] for n in ("weight", "scales", "biases"))
        assert words.dtype == torch.uint32 and words.shape == (96, 64 * bits // 32)
        codes = codes_of(words, bits).reshape(96, 2, 32)
        values = (codes * scales.unsqueeze(-1) + biases.unsqueeze(-1)).flatten(1)
        torch.testing.assert_close(values, model.get_submodule(LAYER).weight, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("dtype", ["uint2", "uint4", "uint5", "uint6", "int8"])
    @pytest.mark.parametrize("scale_type", ["float32", "bfloat16", "float16"])
    @pytest.mark.sampled(2, covers=True)
    def test_the_same_bits_when_read(self, written, logits, dtype, scale_type):
        weight = groups(dtype, dtype == "int8", scale_type=scale_type)
        layers = {"*down_proj": QuantizationConfig(weight=groups("uint6", False)), **EMBEDDING}
        model, path = written(
            config(weight, exclude=["lm_head", "*.0.self_attn.*"], layer_quant_config=layers)
        )
        assert logits(load_checkpoint(path)).equal(logits(model))

    def test_configuration(self, written):
        other = {"*down_proj": QuantizationConfig(weight=groups("int8")), **EMBEDDING}
        _, path = written(config(groups("int4", size=64), layer_quant_config=other))
        found = json.loads((path / "config.json").read_text())
        section = found["quantization_config"]
        assert section.pop("quant_method") == "mlx"
        assert found["quantization"] == section
        eight = {"group_size": 32, "bits": 8, "mode": "affine"}
        assert section.pop("model.layers.0.mlp.down_proj") == eight
        assert section["model.embed_tokens"] == eight
        assert (section["group_size"], section["bits"], section["mode"]) == (64, 4, "affine")
        assert not any(name.startswith("lm_head") for name in section)

    @pytest.mark.parametrize(
        ("weight", "said"),
        [
            (groups("int4", size=16), "its 64 inputs have groups of 16"),
            (groups("int7"), "its weight is int7"),
            (groups("int8", size=None), "its 64 inputs have groups of -1"),
        ],
    )
    def test_refused(self, written, weight, said):
        with pytest.raises(ValueError, match=f"custom_mode='mlx' cannot hold .*{said}.*It holds"):
            written(config(weight))
        with pytest.raises(ValueError, match="its input is quantized"):
            written(config(groups("int4"), groups("int8", is_dynamic=True)))


def foreign(path, scale_dtype=torch.float32, bits=4, group=32, **section):
    """Make a file as MLX's own: scales of both signs, biases of any value, a quantized embedding.

    Returns:
        The dequantized values by the names of the float model.
    """
    generator = torch.Generator().manual_seed(0)
    state = load_file(path / "model.safetensors")
    values, stored = {}, {}
    for name, tensor in state.items():
        if tensor.dim() != 2:
            values[name] = stored[name] = tensor.float()
            continue
        rows, columns = tensor.shape
        codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
        scales = torch.randn(rows, columns // group, generator=generator) / 100
        biases = torch.randn(rows, columns // group, generator=generator) / 10
        scales, biases = scales.to(scale_dtype), biases.to(scale_dtype)
        scales[0, 0] = 0
        layer = name.removesuffix(".weight")
        stored[f"{layer}.weight"] = words_of(codes, bits)
        stored[f"{layer}.scales"], stored[f"{layer}.biases"] = scales, biases
        grouped = codes.reshape(rows, -1, group)
        value = scales.double().unsqueeze(-1) * grouped + biases.double().unsqueeze(-1)
        values[name] = value.flatten(1).float()
    save_file(stored, path / "model.safetensors")
    described = json.loads((path / "config.json").read_text())
    settings = {"group_size": group, "bits": bits, **section}
    described |= {"quantization": settings, "quantization_config": settings}
    (path / "config.json").write_text(json.dumps(described))
    return values


@pytest.fixture
def float_files(build, tmp_path):
    def float_files(kind="llama", **changes):
        build(kind, **changes).save_pretrained(tmp_path / "float")
        return tmp_path / "float"

    return float_files


class TestForeign:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("bits", [3, 4, 8])
    @pytest.mark.sampled(2, covers=True)
    def test_values(self, float_files, dtype, bits):
        path = float_files()
        values = foreign(path, dtype, bits)
        for load in (load_checkpoint, load_in_float):
            model = load(path, dtype=torch.float32)
            for name in (f"{LAYER}.weight", "model.embed_tokens.weight", "lm_head.weight"):
                layer = model.get_submodule(name.removesuffix(".weight"))
                value = layer.value("weight") if load is load_checkpoint else layer.weight
                torch.testing.assert_close(value.float(), values[name], rtol=1e-5, atol=1e-6)

    def test_an_embedding_that_is_the_head_too(self, float_files, logits, tmp_path):
        path = float_files("tied")
        foreign(path, mode="affine")
        model, plain = load_checkpoint(path), load_in_float(path)
        head, embedding = model.lm_head, model.model.embed_tokens
        assert head.quantized_tensor("weight").codes.equal(
            embedding.quantized_tensor("weight").codes
        )
        assert not model.config.tie_word_embeddings
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
        convert(path, tmp_path / "out", "quark")
        assert logits(load_checkpoint(tmp_path / "out")).equal(logits(model))

    def test_an_embedding_with_more_bits(self, float_files):
        """The head that a model has in common with it has them too."""
        path = float_files("tied")
        eight = {"group_size": 32, "bits": 8}
        foreign(path, bits=8, **{"model.embed_tokens": eight})
        settings = json.loads((path / "config.json").read_text())
        names = [n for n in load_file(path / "model.safetensors") if n.endswith(".scales")]
        rest = {n.removesuffix(".scales"): eight for n in names}
        section = {**settings["quantization"], "bits": 4, **rest}
        described = settings | {"quantization": section, "quantization_config": section}
        (path / "config.json").write_text(json.dumps(described))
        assert load_checkpoint(path).lm_head.quant_config.weight.dtype.name == "uint8"

    def test_layers_without_scales_are_in_float(self, written, logits):
        model, path = written(config(groups("uint4", False), exclude=["*.0.*", "lm_head"]))
        loaded = load_checkpoint(path)
        assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert logits(loaded).equal(logits(model))

    def test_scales_alone(self, written):
        _, path = written(config(groups("uint4", False)))
        state = load_file(path / "model.safetensors")
        del state[f"{LAYER}.biases"]
        save_file(state, path / "model.safetensors")
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight.* missing"):
            load_checkpoint(path)

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"mode": "mxfp4"}, "mode='mxfp4' is not supported"),
            ({"bits": 7}, "bits=7 is not supported"),
            ({"bits": None}, "bits=None is not supported"),
            ({"group_size": 16}, "group_size=16 is not supported"),
            ({LAYER: 4}, f"{LAYER}=4 is not supported"),
            ({LAYER: {"bits": 4}}, "group_size=None is not supported"),
        ],
    )
    def test_refused(self, float_files, changed, said):
        path = float_files()
        foreign(path)
        described = json.loads((path / "config.json").read_text())
        section = {**described["quantization"], **changed}
        described |= {"quantization": section, "quantization_config": section}
        (path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ValueError, match=said):
            open_checkpoint(path)

    def test_no_weight_is_quantized(self, float_files):
        path = float_files()
        state = load_file(path / "model.safetensors")
        foreign(path)
        save_file(state, path / "model.safetensors")
        with pytest.raises(ValueError, match="no weight has scales"):
            open_checkpoint(path)


def test_written_again(written, tmp_path):
    _, path = written(config(groups("uint4", False, scale_type="bfloat16")))
    convert(path, tmp_path / "again", "mlx")
    first, second = (load_file(p / "model.safetensors") for p in (path, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_scales_of_both_signs_are_written_as_positive_ones(float_files, tmp_path):
    path = float_files()
    values = foreign(path)
    convert(path, tmp_path / "out", "mlx")
    assert (load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.scales"] > 0).all()
    model = load_in_float(tmp_path / "out")
    for name in (f"{LAYER}.weight", "model.embed_tokens.weight"):
        torch.testing.assert_close(model.state_dict()[name], values[name], rtol=1e-5, atol=1e-6)
