"""GGUF files read back: the codes of the blocks, and what the package of llama.cpp reads."""

import json
import struct

import pytest
import torch
from typer.testing import CliRunner

from quark.cli.main import app
from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.containers.base import get_container
from quark.torch.export.gguf.blocks import block_spec, pack_blocks, unpack_blocks
from quark.torch.export.recognition import load_checkpoint, load_in_float, open_checkpoint
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.packed import PackedLayer
from tests.configurations import config, half_groups, preset
from tests.unit.export.gguf.rewriting import write_gguf

gguf = pytest.importorskip("gguf")
VOCABULARY = 2048  # of the tokenizer
NVFP4 = "nvfp4_weight_only"
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
FLOATS = {"w_mxfp4": "MXFP4", NVFP4: "NVFP4"}


KINDS = {
    "Q4_0": half_groups("int4"),
    "Q4_1": half_groups("uint4", False),
    "Q5_0": half_groups("int5"),
    "Q5_1": half_groups("uint5", False),
    "Q8_0": half_groups("int8"),
}


@pytest.fixture
def made(build, quantize, tmp_path):
    def made(configuration, kind="llama", dtype=torch.float32, **changes):
        model = quantize(build(kind, dtype, vocab_size=VOCABULARY, **changes), configuration, None)
        ModelExporter(tmp_path / "gguf").export_gguf_model(model, model_directory(), "small")
        return model, tmp_path / "gguf" / "small.gguf"

    return made


class TestBlocks:
    @pytest.mark.parametrize("kind", KINDS)
    def test_random_blocks_have_the_values_that_the_package_reads(self, kind):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(8, 128, generator=generator)
        values[3, 32:64] = 0
        values[4, 32:64] = 2.5  # one value: Q4_1 has the scale 0 and keeps it as the least
        number = gguf.GGMLQuantizationType[kind]
        stored = gguf.quantize(values.numpy(), number)
        expected = torch.from_numpy(gguf.dequantize(stored, number))
        blocks = torch.from_numpy(stored)
        state = unpack_blocks(blocks, block_spec(kind, blocks, "layer"), kind)
        torch.testing.assert_close(state.value(torch.float32), expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("kind", KINDS)
    def test_blocks_of_whole_offsets_come_back_bit_for_bit(self, quantize, kind):
        model = quantize(torch.nn.Sequential(torch.nn.Linear(128, 8)), config(KINDS[kind]), None)
        blocks = pack_blocks(model[0].quantized_tensor("weight"), kind)
        found = block_spec(kind, blocks, "layer")
        assert found.zero_point_type.name == "int32"
        assert pack_blocks(unpack_blocks(blocks, found, kind), kind).equal(blocks)

    @pytest.mark.parametrize(("kind", "shape"), [("IQ4_XS", (2, 136)), ("Q4_0", (1, 2, 18))])
    def test_other_types(self, kind, shape):
        with pytest.raises(ValueError, match=f"layer is {kind} with {len(shape)} axes"):
            block_spec(kind, torch.zeros(shape, dtype=torch.uint8), "layer")


class TestNegativeScales:
    """llama.cpp gives a block of these types the sign of its largest value."""

    @pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "IQ4_NL"])
    def test_read_and_converted(self, made, tmp_path, kind):
        layer, inner = "model.layers.1.mlp.up_proj", "blk.1.ffn_up.weight"
        _, path = made(config(half_groups("int4"), exclude=["lm_head", layer]))
        file = tmp_path / "theirs.gguf"
        write_gguf(file, path, {inner: kind})
        loaded = load_checkpoint(file)
        stored = next(t for t in gguf.GGUFReader(file).tensors if t.name == inner)
        expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
        state = loaded.get_submodule(layer).quantized_tensor("weight")
        assert (state.scale < 0).any() and (state.scale > 0).any()
        assert loaded.get_submodule(layer).value("weight").equal(expected)
        modes = ["quark"] if kind == "IQ4_NL" else ["quark", "compressed-tensors", "mlx", "torchao"]
        modes += ["awq", "gptq"] if kind == "Q4_0" else []
        for mode in modes:
            convert(file, tmp_path / mode, mode)
            converted = load_checkpoint(tmp_path / mode).get_submodule(layer)
            assert converted.value("weight").equal(expected), mode
            if mode != "mlx":  # its codes are mirrored
                assert converted.quantized_tensor("weight").scale.equal(state.scale), mode


class TestModel:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.sampled(3)
    def test_the_same_bits(self, made, logits, kind, dtype):
        model, path = made(config(KINDS[kind]), dtype=dtype)
        loaded = open_checkpoint(path).fill()
        assert loaded.dtype == dtype
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "w_mxfp4", NVFP4]
    )
    @pytest.mark.sampled(3)
    def test_the_same_bits_of_super_blocks_and_mx(self, made, logits, name, dtype):
        model, path = made(preset(name), dtype=dtype, **WIDE)
        kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
        assert kinds["blk.0.ffn_down.weight"] == FLOATS.get(name, name.upper())
        loaded = open_checkpoint(path).fill()
        assert isinstance(loaded.model.layers[0].mlp.down_proj, PackedLayer)
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            *(("mistral", {}), ("qwen2", {}), ("gemma2", {"head_dim": 256}), ("tied", {})),
            *(("gemma", {"head_dim": 32}), ("phi", {"pad_token_id": None})),  # not by Transformers
            ("olmo2", {"pad_token_id": None}),
            ("smollm3", {"pad_token_id": None, "num_hidden_layers": 4}),
            ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
            ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
        ],
    )
    def test_families(self, made, logits, kind, changes):
        model, path = made(config(KINDS["Q4_0"]), kind, **changes)
        loaded = open_checkpoint(path.parent).fill()
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)

    def test_layers_without_rotation_in_other_places(self, made):
        """llama.cpp leaves out the rotation of each fourth layer."""
        with pytest.raises(ValueError, match=r"no_rope_layers=\[1, 0\], but llama\.cpp computes"):
            made(config(KINDS["Q4_0"]), "smollm3", pad_token_id=None, no_rope_layers=[1, 0])

    def test_several_types_and_a_quantized_embedding(self, made, logits):
        layers = {
            "*embed_tokens": QuantizationConfig(weight=KINDS["Q8_0"]),
            "*down_proj": QuantizationConfig(weight=KINDS["Q4_1"]),
        }
        whole = config(KINDS["Q4_0"], exclude=["*.0.mlp.up_proj"], layer_quant_config=layers)
        model, path = made(whole)
        loaded = open_checkpoint(path).fill()
        assert loaded.model.embed_tokens.quant_config.weight.dtype.name == "int8"
        assert loaded.model.layers[1].mlp.down_proj.quant_config.weight.dtype.name == "uint4"
        assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert logits(loaded).equal(logits(model))
        in_float = load_in_float(path)
        assert not any(isinstance(module, PackedLayer) for module in in_float.modules())
        assert logits(in_float).equal(logits(model))

    def test_a_quantized_embedding_that_is_the_head_too(self, made, logits, tmp_path):
        _, path = made(config(KINDS["Q4_0"]), "tied")
        (tmp_path / "other").mkdir()
        write_gguf(tmp_path / "other" / "small.gguf", path, {"token_embd.weight": "Q8_0"})
        loaded = open_checkpoint(tmp_path / "other").fill()
        expected = load_in_float(path)
        stored = gguf.quantize(
            expected.model.embed_tokens.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0
        )
        values = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q8_0))
        expected.model.embed_tokens.weight.data.copy_(values)  # the head of the tied model too
        assert logits(loaded).equal(logits(expected))
        convert(tmp_path / "other", tmp_path / "out", "quark")
        assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(expected))

    @pytest.mark.parametrize(("name", "part"), [("q4_1", 2), ("q4_k", 2), ("q4_k", 0)])
    def test_numbers_that_are_not_finite_are_refused(self, made, name, part):
        """A block of these types begins with its scale and its minimum."""
        _, path = made(preset(name), **WIDE)
        (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
        data = bytearray(path.read_bytes())
        data[tensor.data_offset + part : tensor.data_offset + part + 2] = b"\x00\x7e"
        path.write_bytes(data)
        what = "zero points are not finite" if part else "scales of its weight are not sound"
        with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.down_proj\.weight.*{what}"):
            load_checkpoint(path)

    @pytest.mark.parametrize("read", [load_checkpoint, load_in_float])
    def test_floats_that_are_not_finite_are_refused(self, made, read):
        _, path = made(config(KINDS["Q4_0"]))
        (norm,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "output_norm.weight")
        data = bytearray(path.read_bytes())
        data[norm.data_offset : norm.data_offset + 4] = b"\x00\x00\x80\x7f"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"model\.norm\.weight has NaN or infinite values"):
            read(path)

    @pytest.mark.parametrize("configuration", [config(KINDS["Q4_1"]), preset(NVFP4)])
    def test_tensors_are_read_one_by_one(self, made, configuration):
        reader = open_checkpoint(made(configuration, **WIDE)[1]).reader
        tensors = dict(reader.tensors())
        assert tensors.keys() == reader.entries.keys()
        for name, tensor in tensors.items():
            assert reader.tensor(name).equal(tensor), name

    def test_values_of_nvfp4_are_those_of_the_package_times_the_tensor_scale(self, made):
        _, path = made(preset(NVFP4), "qwen3", **WIDE)
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        weight, scale = stored["blk.0.ffn_up.weight"], float(stored["blk.0.ffn_up.scale"].data[0])
        values = torch.from_numpy(gguf.dequantize(weight.data, weight.tensor_type)).double()
        for load in (load_checkpoint, load_in_float):
            layer = load(path).model.layers[0].mlp.up_proj
            torch.testing.assert_close(layer.weight.double(), values * scale, rtol=2**-22, atol=0)
        assert gguf.GGUFReader(path).fields["general.file_type"].contents() == 39

    def test_a_file_without_tensor_scales(self, made, tmp_path, caplog):
        """They are 1 then. Scales of inputs are not read, with a warning."""
        _, path = made(preset(NVFP4), **WIDE)
        target = tmp_path / "other.gguf"
        data = path.read_bytes()
        target.write_bytes(data.replace(b".ffn_up.scale", b".ffn_up.other"))
        with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.other.* unexpected"):
            load_checkpoint(target)
        plain, given = load_in_float(path), gguf.GGUFReader(path).tensors
        scale = next(float(t.data[0]) for t in given if t.name == "blk.0.ffn_up.scale")
        write_gguf(target, path, names={"blk.0.ffn_up.scale": "blk.0.ffn_up.input_scale"})
        up = load_in_float(target).model.layers[0].mlp.up_proj.weight
        torch.testing.assert_close(up * scale, plain.model.layers[0].mlp.up_proj.weight)
        assert "has scales of inputs" in caplog.text

    @pytest.mark.parametrize("kind", ["qwen2", "gemma2", "phi"])
    def test_families_whose_tensor_scales_llama_cpp_leaves_out(self, made, kind):
        with pytest.raises(ValueError, match="leaves out tensor scales in models"):
            made(preset(NVFP4), kind, **WIDE)

    def test_embeddings_have_no_tensor_scale(self, made):
        layers = {"*embed_tokens": scheme(NVFP4)}
        with pytest.raises(ValueError, match=r"an embedding, which llama\.cpp reads without a"):
            made(config(KINDS["Q4_0"], layer_quant_config=layers), **WIDE)

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
    def test_tensor_scales_that_are_not_sound(self, made, scale):
        _, path = made(preset(NVFP4), **WIDE)
        (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.scale")
        data = bytearray(path.read_bytes())
        data[tensor.data_offset : tensor.data_offset + 4] = struct.pack("<f", scale)
        path.write_bytes(data)
        for load in (load_checkpoint, load_in_float):
            with pytest.raises(ValueError, match=r"attn_q\.scale, F32 \[1\], is not one positive"):
                load(path)

    @pytest.mark.parametrize("context", [8192, 1024])
    def test_frequencies_of_llama3(self, made, logits, context):
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        model, path = made(config(KINDS["Q4_0"]), rope_parameters=rope, head_dim=64)
        if context != 8192:
            with pytest.raises(ValueError, match="not those of Llama 3"):
                open_checkpoint(path)
            return
        loaded = open_checkpoint(path).fill()
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "scaling",
        [
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ],
        ids=lambda scaling: scaling["rope_type"],
    )
    def test_scaled_by_a_number(self, made, logits, scaling):
        rope = {"rope_theta": 10000.0, **scaling}
        model, path = made(config(KINDS["Q4_0"]), rope_parameters=rope)
        torch.testing.assert_close(
            logits(open_checkpoint(path).fill()), logits(model), rtol=1e-5, atol=1e-5
        )
        verdict = get_container("gguf").verify(path, model)
        assert verdict.reader == "this package"
        assert verdict.note == "Transformers leaves out the scaling of rotary embedding"

    @pytest.mark.parametrize("to", ["quark", "awq", "gptq", "compressed-tensors"])
    @pytest.mark.sampled(2)
    def test_converted(self, made, logits, tmp_path, to):
        model, path = made(config(KINDS["Q4_1"]))
        convert(path, tmp_path / "out", to, verify=True)
        assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))
        assert (tmp_path / "out" / "tokenizer.json").is_file()

    def test_from_other_formats(self, build, quantize, logits, tmp_path):
        from transformers import AutoTokenizer

        model = quantize(build(vocab_size=VOCABULARY), config(KINDS["Q4_1"]), None)
        tokenizer = AutoTokenizer.from_pretrained(model_directory())
        exporter = ModelExporter(tmp_path / "in")
        exporter.export_safetensors_model(model, custom_mode="awq", tokenizer=tokenizer)
        convert(tmp_path / "in", tmp_path / "out", "gguf", verify=True)
        assert logits(open_checkpoint(tmp_path / "out").fill()).equal(logits(model))

    def test_gguf_to_gguf(self, made, tmp_path):
        with pytest.raises(ValueError, match="is a GGUF file already"):
            convert(made(config(KINDS["Q4_0"]))[1], tmp_path / "out", "gguf")

    def test_inspect(self, made):
        _, path = made(config(KINDS["Q4_1"]))
        for place in (path, path.parent):
            found = json.loads(CliRunner().invoke(app, ["inspect", str(place), "--json"]).stdout)
            assert found["bits_per_weight"] == 8 * 20 / 32 and found["quant_method"] == "gguf"
            assert len(found["layers"]) == 14
