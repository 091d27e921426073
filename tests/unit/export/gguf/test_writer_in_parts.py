"""GGUF files of models that are read in parts: tensor by tensor, the bytes of a model in memory."""

import pytest

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.gguf import writer
from quark.torch.export.gguf.reader import GgufFile
from quark.torch.export.writability import check_exports
from quark.torch.graph.residency import residency_of
from tests.unit.export.gguf.mixtures import MIXTURES, changes_of

pytest.importorskip("gguf")
VOCABULARY = 2048  # of the tokenizer


def written(model, place):
    ModelExporter(place).export_gguf_model(model, model_directory(), "small")
    return (place / "small.gguf").read_bytes()


@pytest.mark.parametrize(
    ("kind", "scheme", "in_float"),
    [
        ("llama", "int4_wo_32", "*.0.mlp.up_proj"),
        ("qwen2", "int8_wo", "*.0.mlp.up_proj"),
        ("mixtral", "int4_wo_32", "*.0.mlp.experts.*"),
        ("qwen2_moe", "int4_wo_32", "*.1.mlp.shared_expert.*"),
        ("gpt_oss", "mxfp4_weight_only", "*.0.mlp.experts.*"),
    ],
)
def test_same_bytes_as_in_memory(
    kind, scheme, in_float, build, config_of, quantize, tmp_path, monkeypatch
):
    config = config_of(scheme, exclude=["lm_head", in_float])
    changes = changes_of(kind) if kind in MIXTURES else {"tie_word_embeddings": kind == "llama"}
    model = build(kind, vocab_size=VOCABULARY, **changes)
    model.save_pretrained(tmp_path / "float")
    streamed = stream_model(tmp_path / "float")
    residency = residency_of(streamed)
    residency.limit = 0
    streamed = quantize(streamed, config, None)
    read, units = residency._read, []
    monkeypatch.setattr(residency, "_read", lambda unit: (units.append(unit.name), read(unit)))
    parts = written(streamed, tmp_path / "parts")
    assert parts == written(quantize(model, config, None), tmp_path / "whole")
    assert len(units) == len(set(units)) > 3  # each part is read once


def test_nothing_is_resident_while_the_tokenizer_is_read(
    build, config_of, quantize, tmp_path, monkeypatch
):
    def values():  # bytes of the parameters that are in memory
        return sum(p.untyped_storage().nbytes() for p in streamed.parameters() if p.numel() > 1)

    build(vocab_size=VOCABULARY).save_pretrained(tmp_path / "float")
    streamed = quantize(stream_model(tmp_path / "float"), config_of("int4_wo_32"), None)
    residency = residency_of(streamed)
    load, taken = writer.load_tokenizer, []
    monkeypatch.setattr(
        writer, "load_tokenizer", lambda path: (taken.append(values()), load(path))[1]
    )
    with residency.use([""]):
        assert values() > 500_000  # the limit lets all parts stay
    exports = {"gguf": ExportSettings(tokenizer_path=model_directory())}
    check_exports(streamed, None, tmp_path / "out", exports)
    with residency.use([""]):
        pass
    written(streamed, tmp_path / "parts")
    assert len(taken) > 1
    assert max(taken) < 1000


@pytest.mark.parametrize("container", ["onnx", "quark_format"])
def test_other_files_need_the_model_in_memory(container, build, config_of, tmp_path):
    build().save_pretrained(tmp_path / "float")
    streamed = stream_model(tmp_path / "float")
    exports = {container: ExportSettings()}
    with pytest.raises(ValueError, match=r"read in parts, and .* --to "):
        check_exports(streamed, config_of("int8_wo"), tmp_path / "out", exports)


def test_the_name_of_the_pre_tokenizer_is_that_of_the_source(build, quantize, tmp_path):
    written(quantize(build(vocab_size=VOCABULARY), "int4_wo_32", None), tmp_path / "first")
    source = tmp_path / "first" / "small.gguf"
    name = GgufFile(source).values["tokenizer.ggml.pre"].encode()
    other = b"x" * len(name)  # one that Transformers does not know
    source.write_bytes(source.read_bytes().replace(name, other, 1))
    model = quantize(build(vocab_size=VOCABULARY + 64), "int4_wo_32", None)
    ModelExporter(tmp_path / "second").export_gguf_model(model, source, "small")
    again = GgufFile(tmp_path / "second" / "small.gguf")
    assert again.values["tokenizer.ggml.pre"] == other.decode()
