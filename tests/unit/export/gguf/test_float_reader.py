"""GGUF files as sources of float models, against what Transformers and the package gguf read."""

import json

import pytest
import torch
from typer.testing import CliRunner

from quark.cli.main import app
from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export.containers.gguf import Gguf
from quark.torch.export.gguf import float_reader
from quark.torch.export.gguf.float_reader import open_gguf_in_float
from quark.torch.export.gguf.reader import _TYPES
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.graph.residency import residency_of
from tests.configurations import config, half_groups
from tests.unit.export.gguf.rewriting import write_gguf

gguf = pytest.importorskip("gguf")
VOCABULARY = 2048  # of the tokenizer
# Types of blocks by tensor. Only the values of TQ2_0 are read.
KINDS = {"ffn_down": "Q5_1", "attn_q": "Q4_1", "attn_v": "TQ2_0", "token_embd": "Q8_0"}


@pytest.fixture(scope="module")
def file(build, quantize, tmp_path_factory):
    """A GGUF file of a small model, with blocks of many types."""
    place = tmp_path_factory.mktemp("gguf")
    model = build("tied", vocab_size=VOCABULARY, hidden_size=256)  # elements of a block of TQ2_0
    model = quantize(model, config(half_groups("int8"), exclude=["lm_head", "*down_proj"]), None)
    ModelExporter(place / "plain").export_gguf_model(model, model_directory(), "small")
    (place / "mixed").mkdir()
    write_gguf(place / "mixed" / "small.gguf", place / "plain" / "small.gguf", KINDS)
    return place / "mixed" / "small.gguf"


@pytest.fixture(scope="module")
def expected(file, logits):
    """Logits of what Transformers reads."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    return logits(model.eval())


def test_sizes_of_blocks_are_those_of_the_package():
    sizes = {kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert all(sizes[name] == (block, size) for name, block, size in _TYPES.values())


def test_values_are_those_that_transformers_reads(file, expected, logits):
    model = load_in_float(file)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_values_of_each_tensor_are_those_of_the_package(file, monkeypatch):
    monkeypatch.setattr(float_reader, "_ELEMENTS", 1000)  # several parts
    model, reader = open_gguf_in_float(file)
    assert not Gguf().has_codes(file)
    assert all(parameter.is_meta for parameter in model.parameters())
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = {
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name, key in names.items():
        values = torch.tensor(gguf.dequantize(stored[key].data, stored[key].tensor_type))
        torch.testing.assert_close(reader.tensor(name), values, rtol=1e-6, atol=1e-7)
        assert reader.entries[name].shape == values.shape


def test_streamed_as_in_memory(file, logits):
    model = load_in_float(file)
    streamed = load_in_float(file, max_memory=1 << 40)
    residency_of(streamed).limit = 0
    assert logits(streamed).equal(logits(model))
    half = load_checkpoint(file, "bfloat16")
    assert half.dtype == torch.bfloat16
    assert half.model.norm.weight.equal(model.model.norm.weight.bfloat16())


def test_blocks_whose_scale_is_no_number_are_refused(file, tmp_path):
    """The scale of a Q5_1 block is its first two bytes, here those of NaN."""
    (tensor,) = (t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_down.weight")
    data = bytearray(file.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"
    path = tmp_path / "small.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight has NaN"):
        load_in_float(path)


def test_tensors_of_another_shape_are_refused(file, tmp_path):
    """The width that the file states is not that of its tensors."""
    field = gguf.GGUFReader(file).fields["llama.feed_forward_length"]
    data = bytearray(file.read_bytes())
    at = data.index(b"llama.feed_forward_length") + len("llama.feed_forward_length") + 4
    assert int.from_bytes(data[at : at + 4], "little") == field.contents()
    data[at : at + 4] = (2 * field.contents()).to_bytes(4, "little")
    path = tmp_path / "small.gguf"
    path.write_bytes(data)
    for memory in (None, 1 << 40):
        with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: .*down_proj\.weight"):
            load_in_float(path, max_memory=memory)


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_line(file, tmp_path):
    """A directory with one file is quantized, in memory and in parts, and evaluated."""
    flags = ("--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", "--num_calib_data", 2)
    flags += ("--seq_len", 32, "--skip_evaluation")
    for name, bound in (("whole", ()), ("parts", ("--max_memory", "10GB"))):
        run("quantize", "--model_dir", file.parent, "--output_dir", tmp_path / name, *flags, *bound)
    outputs = [
        {f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("whole", "parts")
    ]
    assert outputs[0] == outputs[1]
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= outputs[0].keys()
    text = tmp_path / "text.txt"
    text.write_text("a list of the words in a text, and of numbers\n" * 20)
    shown = run(
        *("evaluate", tmp_path / "parts", "--original", file, "--dataset", text, "--seq_len", 16),
        *("--limit", 4, "--json"),
    )
    figures = [model["perplexity"] for model in json.loads(shown)["models"]]
    assert figures[1] == pytest.approx(figures[0], rel=0.5)
    assert json.loads(run("inspect", file, "--json"))["quant_method"] == "gguf"


def test_plan(file):
    shown = run(
        *("quantize", "--model_dir", file, "--quant_scheme", "int4_wo_32", "--quant_algo", "gptq"),
        *("--num_calib_data", 2, "--seq_len", 32, "--plan", "--json"),
    )
    plan = json.loads(shown)
    assert {row["name"].rpartition(".")[2] for row in plan["layers"]} > {"down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:1000], "damaged"),
        (lambda data: data.replace(b"llama", b"lemma"), "lemma"),
    ],
    ids=["short", "architecture"],
)
def test_refused_before_work(damage, said, file, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(damage(file.read_bytes()))
    output = tmp_path / "out"
    flags = ["--output_dir", str(output), "--quant_scheme", "int4_wo_32"]
    result = CliRunner().invoke(app, ["quantize", "--model_dir", str(bad), *flags])
    message = result.output + str(result.exception)
    assert result.exit_code != 0
    assert said in message
    assert str(bad) in message.replace("\n", "")
    assert not output.exists()


def test_several_files_in_a_directory(file, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path)])
    assert result.exit_code == 2
    assert "2 GGUF files" in result.output
