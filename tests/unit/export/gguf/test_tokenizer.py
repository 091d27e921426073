"""The tokenizer of a GGUF file in another one: all that its header says of it."""

from contextlib import nullcontext

import pytest

from quark.demo.text import model_directory
from quark.torch.export.gguf import writer as writer_module
from quark.torch.export.gguf.tokenizer import copy_tokens
from quark.torch.export.gguf.writer import check_header, write_gguf
from tests.unit.export.gguf.headers import TOKENS, write_header

gguf = pytest.importorskip("gguf")
MORE = {
    "tokenizer.ggml.eot_token_id": (1, "UINT32"),  # Transformers keeps none of these
    "tokenizer.ggml.remove_extra_whitespaces": (True, "BOOL"),
    "tokenizer.chat_template.rag": ("{{ documents }}", "STRING"),
    "tokenizer.ggml.precompiled_charsmap": ([0, 255, 7], "UINT8"),
}


def fields(path):
    reader = gguf.GGUFReader(path)
    return {
        name: (field.types, field.contents())
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }


def copied(source, target, size):
    writer = gguf.GGUFWriter(target, "llama")
    copy_tokens(writer, source, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return fields(target)


def test_all_fields(tmp_path):
    source = write_header(tmp_path / "source.gguf", MORE)
    found = copied(source, tmp_path / "target.gguf", len(TOKENS))
    assert found == fields(source) and found.keys() > MORE.keys()


def test_unused_tokens_are_added(tmp_path):
    source = write_header(tmp_path / "source.gguf", MORE)
    found, expected = copied(source, tmp_path / "target.gguf", 7), fields(source)
    own = {
        "tokenizer.ggml.tokens": [*TOKENS, "[PAD5]", "[PAD6]"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 5, 5],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0, -1e6, -1e6],
    }
    assert found == expected | {name: (expected[name][0], own[name]) for name in own}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.scores": ([0.5], "FLOAT32")}, r"scores is not an array for 5 tokens"),
        ({"tokenizer.ggml.token_type": (3, "INT32")}, r"token_type is not an array for 5 tokens"),
        ({"tokenizer.ggml.tokens": ([1, 2], "INT32")}, "has no tokens"),
        ({"tokenizer.ggml.tokens": None}, "has no tokens"),
    ],
)
def test_a_header_that_is_no_tokenizer(change, message, tmp_path):
    source = write_header(tmp_path / "source.gguf", change)
    with pytest.raises(ValueError, match=message):
        copied(source, tmp_path / "target.gguf", 7)


def test_more_tokens_than_the_model(tmp_path):
    source = write_header(tmp_path / "source.gguf", {})
    with pytest.raises(ValueError, match="tokens up to 4, the model only 3"):
        copied(source, tmp_path / "target.gguf", 3)


def test_transformers_does_not_read_it(build, quantize, tmp_path, monkeypatch):
    """It takes 100 times the header to do so."""
    monkeypatch.setattr(writer_module, "load_tokenizer", None)
    source = write_header(tmp_path / "source.gguf", MORE)
    model = quantize(build(), "int4_wo_32", None)
    check_header(model, source)
    write_gguf(model, lambda size: nullcontext(tmp_path), "small", source)
    assert fields(tmp_path / "small.gguf").keys() == fields(source).keys()
    with pytest.raises(TypeError):
        check_header(model, model_directory())
