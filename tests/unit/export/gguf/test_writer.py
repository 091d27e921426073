"""GGUF files, read by the package of llama.cpp: blocks, names, tokens and numbers."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from quark.torch import ModelExporter, ModelImporter, export_gguf
from quark.torch.export.gguf.blocks import block_type, pack_blocks
from quark.torch.quantization.config.config import Config, GPTQConfig, QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.configurations import config, groups

gguf = pytest.importorskip("gguf")

WORDS = ["<s>", "</s>", *"abcdefgh", "ab", "abc", "Ġ"]
MERGES = [("a", "b"), ("ab", "c")]
NUMBERS = [("1", "2"), ("12", "3"), ("a", "b")]
WORDS_OF_LLAMA = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def vocabulary(names):
    return {name: i for i, name in enumerate(names)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer with merges, saved to a directory."""
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocabulary(WORDS), MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template="{{ messages }}",
    ).save_pretrained(path)
    return path


@pytest.fixture
def write(tmp_path, tokenizer):
    """Write a model and read it back with the package."""

    def write(model):
        export_gguf(model, tmp_path / "gguf", "small", tokenizer, overwrite=True)
        return gguf.GGUFReader(tmp_path / "gguf" / "small.gguf")

    return write


def values(reader):
    return {t.name: torch.tensor(gguf.dequantize(t.data, t.tensor_type)) for t in reader.tensors}


def field(reader, name):
    return reader.fields[name].contents()


def halves_together(rows, head):
    """Undo the order of queries and keys in GGUF: first the even rows of a head, then the odd."""
    return rows.reshape(-1, head // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


class TestBlocks:
    @pytest.mark.parametrize(
        ("weight", "kind"),
        [
            (groups("uint4", False), "Q4_1"),
            (groups("uint4", False, 64), "Q4_1"),
            (groups("int4", False, None), "Q4_1"),
            (groups("uint2", False), "Q4_1"),
            (groups("int4"), "Q4_0"),
            (groups("uint4"), "Q4_0"),
            (groups("int3", size=None), "Q4_0"),
            (groups("int8"), "Q8_0"),
            (groups("int8", size=None), "Q8_0"),
            (groups("int8", qscheme="per_tensor", size=None, ch_axis=None), "Q8_0"),
        ],
    )
    def test_the_package_reads_frozen_weights(self, quantize, weight, kind):
        layer = torch.nn.Linear(128, 24)
        model = quantize(torch.nn.Sequential(layer), config(weight), None)
        state = model[0].quantized_tensor("weight")
        assert block_type(weight, 128) == kind
        blocks = pack_blocks(state, kind)
        read = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
        scale = state.scale.reshape(state.scale.shape[0], -1) if state.scale.dim() else state.scale
        largest = 16 if kind == "Q4_1" else 128
        bound = scale.max() * largest * 2**-11 * 2
        torch.testing.assert_close(torch.from_numpy(read), model[0].weight, rtol=0, atol=bound)

    @pytest.mark.parametrize("dtype", ["int4", "int8"])
    def test_scales_that_float16_holds_lose_nothing(self, quantize, dtype):
        weight = groups(dtype, scale_type="float16")
        model = quantize(torch.nn.Sequential(torch.nn.Linear(64, 8)), config(weight), None)
        kind = block_type(weight, 64)
        blocks = pack_blocks(model[0].quantized_tensor("weight"), kind).numpy()
        read = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
        assert read.equal(model[0].weight)

    @pytest.mark.parametrize(
        "weight",
        [
            groups("uint8", False),
            groups("int4", size=16),
            groups("int4", qscheme="per_channel", ch_axis=1, size=None),
            groups("int16"),
            QuantizationSpec("fp8_e4m3", qscheme="per_tensor", is_dynamic=False),
            groups("uint4", False, zero_point_type="float32"),
        ],
    )
    def test_what_no_block_holds(self, weight):
        assert block_type(weight, 128) is None


class TestFile:
    def test_every_tensor_of_a_llama(self, build, quantize, write):
        model = quantize(build(), config(groups("int4", scale_type="float16")))
        found = values(write(model))
        head = model.config.hidden_size // model.config.num_attention_heads
        for i, block in enumerate(model.model.layers):
            layers = {
                "attn_v": block.self_attn.v_proj,
                "attn_output": block.self_attn.o_proj,
                "ffn_gate": block.mlp.gate_proj,
                "ffn_up": block.mlp.up_proj,
                "ffn_down": block.mlp.down_proj,
                "attn_norm": block.input_layernorm,
                "ffn_norm": block.post_attention_layernorm,
            }
            for name, layer in layers.items():
                assert found.pop(f"blk.{i}.{name}.weight").equal(layer.weight), name
            for name in ("q", "k"):
                rows = halves_together(found.pop(f"blk.{i}.attn_{name}.weight"), head)
                assert rows.equal(block.self_attn.get_submodule(f"{name}_proj").weight)
        assert found.pop("token_embd.weight").equal(model.model.embed_tokens.weight)
        assert found.pop("output.weight").equal(model.lm_head.weight)
        assert found.pop("output_norm.weight").equal(model.model.norm.weight)
        assert not found

    @pytest.mark.parametrize(
        ("weight", "kind", "file_type"),
        [
            (groups("uint4", False), "Q4_1", 3),
            (groups("int4"), "Q4_0", 2),
            (groups("int8"), "Q8_0", 7),
        ],
    )
    @pytest.mark.parametrize(
        ("dtype", "plain"),
        [(torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")],
    )
    def test_types(self, build, quantize, write, weight, kind, file_type, dtype, plain):
        model = quantize(build(dtype=dtype), config(weight))
        reader = write(model)
        kinds = {t.name: t.tensor_type.name for t in reader.tensors}
        assert kinds["blk.0.ffn_up.weight"] == kinds["blk.1.attn_q.weight"] == kind
        assert kinds["token_embd.weight"] == kinds["output.weight"] == plain
        assert kinds["output_norm.weight"] == "F32"
        assert field(reader, "general.file_type") == file_type
        assert values(reader)["token_embd.weight"].equal(model.model.embed_tokens.weight.float())

    def test_numbers(self, build, quantize, write):
        reader = write(quantize(build(), config(groups("int4"))))
        expected = {
            "context_length": 64,
            "embedding_length": 64,
            "block_count": 2,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "rope.dimension_count": 16,
            "rope.freq_base": 10000.0,
            "vocab_size": 64,
        }
        assert {name: field(reader, f"llama.{name}") for name in expected} == expected
        assert field(reader, "general.architecture") == "llama"
        eps = field(reader, "llama.attention.layer_norm_rms_epsilon")
        assert eps == pytest.approx(1e-6)

    def test_a_tied_head_is_stored_once(self, build, quantize, write):
        names = {t.name for t in write(quantize(build("tied"), config(groups("int4")))).tensors}
        assert "token_embd.weight" in names and "output.weight" not in names

    def test_a_quantized_embedding(self, build, quantize, write):
        weight = groups("int8", scale_type="float16")
        layers = {"*embed_tokens": QuantizationConfig(weight=weight)}
        model = quantize(build(), config(weight, exclude=[], layer_quant_config=layers))
        found = values(write(model))
        assert found["token_embd.weight"].equal(model.model.embed_tokens.weight)
        assert found["output.weight"].equal(model.lm_head.weight)

    def test_weights_of_gptq(self, build, quantize, write):
        weight = groups("int4", scale_type="float16")
        model = quantize(build(), config(weight, algo_config=[GPTQConfig()]))
        down = model.model.layers[1].mlp.down_proj.weight
        assert values(write(model))["blk.1.ffn_down.weight"].equal(down)
        assert not down.equal(
            quantize(build(), config(weight)).model.layers[1].mlp.down_proj.weight
        )

    def test_an_imported_model(self, build, quantize, export, write):
        model = quantize(build(), config(groups("uint4", False)))
        loaded = ModelImporter(export(model, custom_mode="gptq"), "safetensors")
        one = values(write(model))
        two = values(write(loaded.import_model_info(build(device="meta"))))
        assert one.keys() == two.keys()
        assert all(one[name].equal(two[name]) for name in one)

    def test_norms_of_gemma_are_what_they_multiply_by(self, build, quantize, write):
        model = build("gemma2", head_dim=16)
        torch.nn.init.normal_(model.model.norm.weight.detach())
        found = values(write(quantize(model, config(groups("int4")))))
        assert found["output_norm.weight"].equal(model.model.norm.weight + 1)

    def test_frequencies_of_llama3(self, build, quantize, write):
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        model = quantize(build(rope_parameters=rope), config(groups("int4")))
        factors = values(write(model))["rope_freqs.weight"]
        frequencies = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        assert factors[0] == 1 and factors[-1] == pytest.approx(8)
        found = model.model.rotary_emb.inv_freq
        torch.testing.assert_close(frequencies / factors, found)


class TestFamilies:
    """Through Transformers, which reads GGUF by the rules of llama.cpp."""

    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            ("llama", {}),
            ("mistral", {}),
            ("qwen2", {}),
            ("qwen3", {"head_dim": 128}),  # Transformers does not read it
            ("gemma2", {"head_dim": 256}),
            ("gemma3_text", {"head_dim": 256}),
            ("phi3", {"pad_token_id": 0}),
        ],
    )
    def test_logits(self, build, quantize, write, logits, tmp_path, kind, changes):
        from transformers import AutoModelForCausalLM

        model = quantize(build(kind, **changes), config(groups("int4", scale_type="float16")))
        write(model)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "gguf", gguf_file="small.gguf", dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
        torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", ["gemma", "phi"])
    def test_the_file_is_complete(self, build, quantize, write, kind):
        """Transformers does not read these."""
        model = quantize(build(kind, **({"head_dim": 16} if kind == "gemma" else {})), "int4_wo_32")
        count = sum(p.numel() for p in model.parameters())
        assert sum(t.n_elements for t in write(model).tensors) == count


class TestTokens:
    def test_bytes_and_merges(self, build, quantize, write):
        reader = write(quantize(build(), "int4_wo_32"))
        tokens = field(reader, "tokenizer.ggml.tokens")
        assert tokens[: len(WORDS)] == WORDS and tokens[-1] == "[PAD63]" and len(tokens) == 64
        assert field(reader, "tokenizer.ggml.token_type")[:3] == [3, 3, 1]
        assert field(reader, "tokenizer.ggml.token_type")[-1] == 5
        assert field(reader, "tokenizer.ggml.merges") == ["a b", "ab c"]
        assert field(reader, "tokenizer.ggml.model") == "gpt2"
        assert field(reader, "tokenizer.ggml.pre") == "gpt-2"
        assert field(reader, "tokenizer.ggml.bos_token_id") == 0
        assert field(reader, "tokenizer.ggml.eos_token_id") == 1
        assert not field(reader, "tokenizer.ggml.add_bos_token")
        assert field(reader, "tokenizer.chat_template") == "{{ messages }}"

    @pytest.mark.parametrize(
        ("cut", "name"),
        [
            (WORDS_OF_LLAMA + r"|\p{N}{1,3}" + REST, "llama-bpe"),
            (WORDS_OF_LLAMA + r"|\p{N}" + REST, "qwen2"),
        ],
    )
    def test_cuts(self, build, quantize, tmp_path, cut, name):
        """Transformers makes the same tokenizer of the file."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = Tokenizer(models.BPE(vocabulary(["<s>", *symbols, "12", "123", "ab"]), NUMBERS))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        one = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<s>")
        one.save_pretrained(tmp_path / "tokenizer")
        model = quantize(build(vocab_size=288), "int4_wo_32")
        export_gguf(model, tmp_path / "out", "small", tmp_path / "tokenizer")
        reader = gguf.GGUFReader(tmp_path / "out" / "small.gguf")
        assert field(reader, "tokenizer.ggml.pre") == name
        two = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="small.gguf")
        text = "ab 12345, aB's\n\n 67  c"
        assert two(text)["input_ids"] == one(text)["input_ids"]

    def test_an_unknown_cut(self, build, quantize, tokenizer, tmp_path):
        described = json.loads((tokenizer / "tokenizer.json").read_text())
        described["pre_tokenizer"] = {"type": "Digits", "individual_digits": True}
        (tmp_path / "tokenizer.json").write_text(json.dumps(described))
        made = (tokenizer / "tokenizer_config.json").read_text()
        (tmp_path / "tokenizer_config.json").write_text(made)
        model = quantize(build(), "int4_wo_32")
        with pytest.raises(ValueError, match=r"the name in llama\.cpp of the pre-tokenizer"):
            export_gguf(model, tmp_path / "out", "small", tmp_path)

    @pytest.fixture
    def pieces(self, tmp_path):
        """A tokenizer as SentencePiece makes them."""
        from tokenizers import normalizers
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        names = ["<unk>", "<s>", "</s>", "<0x00>", "<0x41>", "▁", "a", "b", "ab", "▁ab"]
        model = models.BPE(
            vocabulary(names), [("a", "b"), ("▁", "ab")], unk_token="<unk>", byte_fallback=True
        )
        made = Tokenizer(model)
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        path = tmp_path / "pieces"
        PreTrainedTokenizerFast(
            tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        ).save_pretrained(path)
        return path

    def test_pieces_and_scores(self, build, quantize, tokenizer, pieces, tmp_path):
        model = quantize(build(), "int4_wo_32")
        export_gguf(model, tmp_path / "out", "small", pieces)
        reader = gguf.GGUFReader(tmp_path / "out" / "small.gguf")
        assert field(reader, "tokenizer.ggml.model") == "llama"
        assert field(reader, "tokenizer.ggml.token_type")[:10] == [2, 3, 3, 6, 6, 1, 1, 1, 1, 1]
        scores = field(reader, "tokenizer.ggml.scores")
        assert scores[8] > scores[9] > scores[6]  # the first merge, the second, no merge
        assert field(reader, "tokenizer.ggml.add_bos_token")
        assert field(reader, "tokenizer.ggml.add_space_prefix")


class TestRefused:
    @pytest.mark.parametrize(
        ("configuration", "said"),
        [
            (config(groups("int4", size=16)), "int4 per_group, group_size=16"),
            (Config(scheme("fp8", 32)), "its input is quantized"),
            (Config(scheme("w_mxfp8", 32)), "is fp8_e4m3 per_group"),
            (Config(scheme("q4_k")), "of 64 inputs is uint4 per_group"),
        ],
    )
    def test_schemes(self, build, quantize, tmp_path, tokenizer, configuration, said):
        model = quantize(build(), configuration)
        with pytest.raises(ValueError, match=f"GGUF cannot hold .*{said}.*It holds"):
            export_gguf(model, tmp_path / "out", "small", tokenizer)
        assert not (tmp_path / "out").exists()

    def test_other_families(self, build, quantize, tmp_path, tokenizer):
        model = quantize(build("opt"), "int4_wo_32")
        with pytest.raises(ValueError, match=r"model types llama, .*, not 'opt'"):
            export_gguf(model, tmp_path / "out", "small", tokenizer)

    def test_a_tokenizer_of_another_model(self, build, quantize, tmp_path, tokenizer):
        model = quantize(build(vocab_size=8, pad_token_id=0), "int4_wo_32", None)
        with pytest.raises(ValueError, match="tokens up to 12, the model only 8"):
            export_gguf(model, tmp_path / "out", "small", tokenizer)
        with pytest.raises(ValueError, match="has no tokenizer that Transformers loads"):
            export_gguf(model, tmp_path / "out", "small", tmp_path)
        assert not (tmp_path / "out").exists()

    def test_a_float_model(self, build, tmp_path, tokenizer):
        with pytest.raises(ValueError, match="no quantized module"):
            ModelExporter(tmp_path / "out").export_gguf_model(build(), tokenizer, "small")
