"""Mixtures of experts in GGUF files: stacks of the matrices of all experts, codes unchanged."""

import struct

import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export import convert
from quark.torch.export.containers.base import get_container
from quark.torch.export.recognition import load_checkpoint, load_in_float, open_checkpoint
from quark.torch.graph.residency import residency_of
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from tests.configurations import config, half_groups, preset
from tests.unit.export.gguf.mixtures import MIXTURES, STACKS, changes_of
from tests.unit.export.gguf.rewriting import write_gguf

gguf = pytest.importorskip("gguf")
VOCABULARY = 2048  # of the tokenizer
INT4 = half_groups("int4")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture
def made(build, quantize, tmp_path):
    def made(configuration, kind="mixtral", dtype=torch.float32, **changes):
        model = build(kind, dtype, vocab_size=VOCABULARY, **changes_of(kind, **changes))
        model = quantize(model, configuration, None)
        ModelExporter(tmp_path / "gguf").export_gguf_model(model, model_directory(), "small")
        return model, tmp_path / "gguf" / "small.gguf"

    return made


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor):
    return torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))


def stacks(block, kind, attribute):
    """Return the matrices or biases of all experts of a block, by their names in the file."""
    experts, parts = block.mlp.experts, MIXTURES[kind][1]
    layers = [[experts.get_submodule(f"{n}.{part}") for n in range(4)] for part in parts]
    found = [torch.stack([getattr(layer, attribute) for layer in part]) for part in layers]
    if kind == "gpt_oss":  # the rows of gate and up alternate
        found = [found[0][:, ::2], found[0][:, 1::2], found[1]]
    return dict(zip(STACKS, found, strict=True))


def with_number(path, key, value):
    """Write another number of the header, an unsigned integer of 32 bits, in place."""
    data, name = bytearray(path.read_bytes()), key.encode()
    at = data.index(name) + len(name) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)


class TestWriting:
    @pytest.mark.parametrize("kind", MIXTURES)
    def test_stacks_have_the_values_of_every_expert(self, made, kind):
        model, path = made(config(INT4), kind)
        stored = tensors_of(path)
        for number, block in enumerate(model.model.layers):
            tensors = {stack: stored[f"blk.{number}.{stack}.weight"] for stack in STACKS}
            assert {tensor.tensor_type.name for tensor in tensors.values()} == {"Q4_0"}
            for stack, weights in stacks(block, kind, "weight").items():
                assert values(tensors[stack]).equal(weights), stack
            router = block.mlp.router if kind == "gpt_oss" else block.mlp.gate
            assert values(stored[f"blk.{number}.ffn_gate_inp.weight"]).equal(router.weight)

    def test_biases_and_sinks(self, made):
        model, path = made(config(INT4), "gpt_oss")
        stored, block = tensors_of(path), model.model.layers[1]
        for stack, biases in stacks(block, "gpt_oss", "bias").items():
            assert values(stored[f"blk.1.{stack}.bias"]).equal(biases), stack
        assert values(stored["blk.1.ffn_gate_inp.bias"]).equal(block.mlp.router.bias)
        assert values(stored["blk.1.attn_sinks.weight"]).equal(block.self_attn.sinks)

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("mixtral", {"llama.feed_forward_length": 96}),
            (
                "gpt_oss",
                {
                    "gpt-oss.expert_feed_forward_length": 96,
                    "gpt-oss.attention.sliding_window": 8,
                    "gpt-oss.rope.scaling.type": "yarn",
                    "gpt-oss.rope.scaling.factor": 4.0,
                    "gpt-oss.rope.scaling.original_context_length": 16,
                    "gpt-oss.rope.scaling.yarn_beta_fast": 32.0,
                    "gpt-oss.rope.scaling.yarn_beta_slow": 1.0,
                },
            ),
            (
                "qwen2_moe",
                {
                    "qwen2moe.expert_feed_forward_length": 32,
                    "qwen2moe.expert_shared_feed_forward_length": 128,
                },
            ),
            ("qwen3_moe", {"qwen3moe.expert_feed_forward_length": 32}),
            ("olmoe", {"olmoe.feed_forward_length": 96}),
        ],
    )
    def test_numbers(self, made, kind, expected):
        fields = gguf.GGUFReader(made(config(INT4), kind)[1]).fields
        name = next(iter(expected)).partition(".")[0]
        expected |= {f"{name}.expert_count": 4, f"{name}.expert_used_count": 2}
        assert {key: fields[key].contents() for key in expected} == expected
        assert fields["general.architecture"].contents() == name

    def test_experts_in_float(self, made, logits):
        model, path = made(config(INT4, exclude=["*experts*", "lm_head"]), "qwen3_moe")
        experts = model.model.layers[1].mlp.experts
        stored = tensors_of(path)
        gate, up = experts.gate_up_proj.chunk(2, 1)
        expected = {"gate": gate, "up": up, "down": experts.down_proj}
        for name, stack in expected.items():
            assert values(stored[f"blk.1.ffn_{name}_exps.weight"]).equal(stack)
        entries = open_checkpoint(path).reader.entries.values()
        sizes = [int(tensor.n_bytes) for tensor in stored.values()]
        assert sum(entry.nbytes for entry in entries) == sum(sizes)
        loaded = load_checkpoint(path)
        assert type(loaded.model.layers[1].mlp.experts) is type(experts)
        assert logits(loaded).equal(logits(model))

    @pytest.mark.parametrize(
        ("layers", "said"),
        [
            ({"*experts.2.w3": half_groups("int8")}, "expert 0 has Q4_0 and expert 2 Q8_0"),
            ({"*experts.0.w3": None}, "expert 0 has F32 and expert 1 Q4_0"),
        ],
    )
    def test_stacks_of_several_types_are_refused(self, made, layers, said, tmp_path):
        exclude = [name for name, weight in layers.items() if weight is None]
        others = {n: QuantizationConfig(weight=weight) for n, weight in layers.items() if weight}
        mixed = config(INT4, exclude=["lm_head", *exclude], layer_quant_config=others)
        with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.experts and 1 more: w3 .*{said}"):
            made(mixed)
        assert not (tmp_path / "gguf").exists()

    @pytest.mark.parametrize(
        ("kind", "field", "value"),
        [
            ("qwen2_moe", "norm_topk_prob", True),
            ("qwen3_moe", "norm_topk_prob", False),
            ("qwen3_moe", "attention_bias", True),
            ("qwen3_moe", "hidden_act", "gelu"),
            ("olmoe", "clip_qkv", 4.0),
            ("olmoe", "tie_word_embeddings", True),
            ("olmoe", "num_key_value_heads", 2),
            ("gpt_oss", "attention_bias", False),
            ("gpt_oss", "swiglu_limit", 5.0),
            ("gpt_oss", "layer_types", ["full_attention", "sliding_attention"]),
        ],
    )
    def test_models_that_llama_cpp_computes_otherwise(self, made, kind, field, value):
        with pytest.raises(ValueError, match=rf"has {field}=.*, but llama\.cpp computes"):
            made(config(INT4), kind, **{field: value})

    def test_yarn_with_a_factor_of_its_own(self, made):
        rope = MIXTURES["gpt_oss"][0]["rope_parameters"] | {"attention_factor": 2.0}
        with pytest.raises(ValueError, match="yarn without attention_factor"):
            made(config(INT4), "gpt_oss", rope_parameters=rope)


class TestReading:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", MIXTURES)
    def test_the_same_bits(self, made, logits, kind, dtype):
        model, path = made(config(INT4), kind, dtype)
        loaded = load_checkpoint(path)
        assert loaded.dtype == dtype
        assert type(loaded) is type(model)
        assert logits(loaded).equal(logits(model))
        layer = loaded.model.layers[1].mlp.experts.get_submodule(f"3.{MIXTURES[kind][1][0]}")
        expected = model.model.layers[1].mlp.experts.get_submodule(f"3.{MIXTURES[kind][1][0]}")
        for part in ("codes", "scale"):
            one, two = (getattr(m.quantized_tensor("weight"), part) for m in (layer, expected))
            assert one.reshape(-1).equal(two.reshape(-1).to(one.dtype))
        if dtype == torch.float32:  # in others, a router may choose another expert
            found = logits(load_in_float(path))
            torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["q4_k", "w_mxfp4", "nvfp4_weight_only"])
    @pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
    def test_other_blocks(self, made, logits, name, kind):
        sizes = {"moe_intermediate_size": 256, "head_dim": 64} if kind == "qwen3_moe" else {}
        model, path = made(preset(name), kind, **WIDE, **sizes)
        assert logits(load_checkpoint(path)).equal(logits(model))
        if name == "nvfp4_weight_only":
            scales = tensors_of(path)["blk.0.ffn_up_exps.scale"].data
            part = MIXTURES[kind][1][1]
            experts = model.model.layers[0].mlp.experts
            states = [
                experts.get_submodule(f"{n}.{part}").quantized_tensor("weight") for n in range(4)
            ]
            assert scales.tolist() == [float(state.scale_2) for state in states]

    def test_tensor_scales_that_are_not_sound(self, made):
        _, path = made(preset("nvfp4_weight_only"), **WIDE)
        scales = tensors_of(path)["blk.0.ffn_up_exps.scale"]
        data = bytearray(path.read_bytes())
        data[scales.data_offset + 8 : scales.data_offset + 12] = struct.pack("<f", -1.0)
        path.write_bytes(data)
        for load in (load_checkpoint, load_in_float):
            with pytest.raises(ValueError, match=r"up_exps\.scale, F32 \[4\], is not 4 such"):
                load(path)

    @pytest.mark.parametrize("kind", ["qwen2_moe", "olmoe"])
    def test_families_whose_tensor_scales_llama_cpp_leaves_out(self, made, kind):
        with pytest.raises(ValueError, match="leaves out tensor scales in models"):
            made(config(scheme("nvfp4_weight_only").weight), kind)

    @pytest.mark.parametrize("stack", ["Q8_0", "Q4_1", "F16"])
    def test_files_of_other_writers(self, made, logits, tmp_path, stack):
        """The package of llama.cpp writes the stacks of the matrices after the gate."""
        _, path = made(config(INT4), "qwen3_moe")
        file = tmp_path / "theirs.gguf"
        write_gguf(file, path, {"ffn_down_exps": stack})
        loaded, in_float = load_checkpoint(file), load_in_float(file)
        expected = values(tensors_of(file)["blk.1.ffn_down_exps.weight"])
        experts = loaded.model.layers[1].mlp.experts
        rows = torch.stack([experts.get_submodule(f"{n}.down_proj").weight for n in range(4)])
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)
        stacked = in_float.model.layers[1].mlp.experts.down_proj
        torch.testing.assert_close(stacked, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(logits(loaded), logits(in_float), rtol=1e-4, atol=1e-4)
        convert(file, tmp_path / "out", "quark")
        assert logits(load_checkpoint(tmp_path / "out")).equal(logits(loaded))

    @pytest.mark.parametrize("stack", ["MXFP4", "Q4_1", "F16"])
    def test_alternating_rows_of_other_writers(self, made, logits, tmp_path, stack):
        _, path = made(config(INT4, exclude=["lm_head", "*experts*"]), "gpt_oss")
        file = tmp_path / "theirs.gguf"
        write_gguf(file, path, {"exps.weight": stack})
        loaded, in_float = load_checkpoint(file), load_in_float(file)
        torch.testing.assert_close(logits(loaded), logits(in_float), rtol=1e-4, atol=1e-4)
        stored, experts = tensors_of(file), in_float.model.layers[1].mlp.experts
        gate, up = (values(stored[f"blk.1.ffn_{name}_exps.weight"]) for name in ("gate", "up"))
        rows = experts.gate_up_proj.transpose(1, 2)
        torch.testing.assert_close(rows[:, ::2], gate, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(rows[:, 1::2], up, rtol=1e-6, atol=1e-7)
        write_gguf(file, path, {"ffn_gate_exps.weight": "Q8_0"})
        with pytest.raises(ValueError, match="of the types F32 and Q8_0, but their rows are in"):
            load_checkpoint(file)

    def test_a_model_that_is_read_in_parts(self, made, logits):
        _, path = made(config(INT4), "qwen2_moe")
        streamed = load_in_float(path, max_memory=1 << 40)
        residency_of(streamed).limit = 0
        assert logits(streamed).equal(logits(load_in_float(path)))

    def test_a_file_without_what_llama_cpp_infers(self, made, logits, tmp_path):
        """Its own converter leaves out these values, and writes gates of shared experts so."""
        model, path = made(config(INT4, exclude=["lm_head", "*shared_expert_gate"]), "qwen2_moe")
        keys = ("attention.key_length", "rope.dimension_count", "vocab_size")
        write_gguf(tmp_path / "theirs.gguf", path, without=[f"qwen2moe.{key}" for key in keys])
        assert list(tensors_of(path)["blk.0.ffn_gate_inp_shexp.weight"].shape) == [64]
        assert logits(load_checkpoint(tmp_path / "theirs.gguf")).equal(logits(model))

    @pytest.mark.parametrize(
        ("kind", "key", "value", "said"),
        [
            ("mixtral", "llama.expert_count", 5, r"has the shape \[4, 96, 64\], expected \[5, 96"),
            ("mixtral", "llama.expert_count", 1 << 30, "expert_count=1073741824"),
            ("mixtral", "llama.expert_count", 0, r"ffn_gate\.weight.* missing"),
            ("mixtral", "llama.expert_used_count", 5, "num_experts_per_tok=5, but num_"),
            ("olmoe", "olmoe.expert_used_count", 0, "expert_used_count, expected a positive int"),
            ("qwen2_moe", "qwen2moe.expert_feed_forward_length", 64, r"expected \[4, 64, 64\]"),
            ("qwen2_moe", "qwen2moe.expert_shared_feed_forward_length", 64, "shared_expert"),
            ("olmoe", "olmoe.rope.dimension_count", 8, "heads have 16 elements"),
            ("olmoe", "olmoe.embedding_length", 32, r"expected \[4, 96, 32\]"),
            ("gpt_oss", "gpt-oss.rope.scaling.original_context_length", 0, "expected a positive"),
            ("gpt_oss", "gpt-oss.expert_count", 5, r"expected \[5, 96, 64\] for 5 experts"),
            ("olmoe", "olmoe.block_count", 3, r"blk\.2\..* missing"),
        ],
    )
    def test_contradictions(self, made, kind, key, value, said):
        _, path = made(config(INT4), kind)
        with_number(path, key, value)
        for load in (load_checkpoint, load_in_float):
            with pytest.raises(ValueError, match=said):
                load(path)

    @pytest.mark.parametrize("key", ["expert_used_count", "attention.layer_norm_rms_epsilon"])
    def test_missing_numbers(self, made, tmp_path, key):
        _, path = made(config(INT4), "olmoe")
        write_gguf(tmp_path / "other.gguf", path, without=[f"olmoe.{key}"])
        with pytest.raises(ValueError, match=rf"has no olmoe\.{key}, expected a positive"):
            load_checkpoint(tmp_path / "other.gguf")


@pytest.mark.parametrize("kind", MIXTURES)
def test_converted_and_verified(made, logits, tmp_path, kind):
    from transformers import AutoTokenizer

    model, path = made(config(INT4), kind)
    convert(path, tmp_path / "quark", "quark", verify=True)
    assert logits(load_checkpoint(tmp_path / "quark")).equal(logits(model))
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(tmp_path / "quark")
    convert(tmp_path / "quark", tmp_path / "again", "gguf", verify=True)
    (again,) = (tmp_path / "again").glob("*.gguf")
    one, two = tensors_of(path), tensors_of(again)
    assert one.keys() == two.keys()
    assert all((one[name].data == two[name].data).all() for name in one)


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        ("qwen2_moe", {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}),
        ("qwen3_moe", {"moe_intermediate_size": 768}),
    ],
)
def test_transformers_computes_the_same(made, kind, widths):
    """It takes widths of experts from its own defaults, and does not read the other mixtures."""
    model, path = made(config(INT4), kind, **widths)
    verdict = get_container("gguf").verify(path, model)
    assert verdict.reader.startswith("transformers")
    assert verdict.difference < 1e-4
