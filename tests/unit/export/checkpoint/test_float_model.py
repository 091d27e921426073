"""Float models: each tensor is read from the files, in the class that config.json names."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from quark.torch.export.checkpoint import float_model
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.file_to_file import quantize_files
from quark.torch.export.recognition import check_checkpoint, load_checkpoint
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.models import architectures

FILE = "model.safetensors"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def stored(build, tmp_path):
    """Save a float model, change its tensors or its config.json, and return the directory."""

    def stored(name="llama", change=lambda tensors: None, **settings):
        build(name).save_pretrained(tmp_path / "model")
        tensors = load_file(tmp_path / "model" / FILE)
        change(tensors)
        save_file(tensors, tmp_path / "model" / FILE, metadata={"format": "pt"})
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return path.parent

    return stored


@pytest.mark.parametrize("name", ["llama", "tied", "opt", "gpt2", "mixtral"])
def test_a_sound_model(stored, build, logits, name):
    loaded = load_checkpoint(stored(name))
    assert type(loaded) is type(build(name))
    assert logits(loaded).equal(logits(build(name)))


def rename_all(tensors):
    for name in list(tensors):
        tensors[f"net.{name.replace('layers', 'stages')}"] = tensors.pop(name)


def drop_layer(tensors):
    for name in [n for n in tensors if ".layers.1." in n]:
        del tensors[name]


def integers(tensors):
    tensors[K_PROJ] = tensors[K_PROJ].mul(100).to(torch.int8)


DAMAGES = {
    "renamed": (rename_all, {}, "are missing"),
    "one missing": (lambda t: t.pop(K_PROJ), {}, "k_proj.weight is missing"),
    "a layer missing": (drop_layer, {}, r"layers\.1\..* missing"),
    "fewer layers": (lambda t: None, {"num_hidden_layers": 1}, r"layers\.1\..* unexpected"),
    "integers": (integers, {}, r"k_proj.weight is torch.int8 .* expected torch.float32"),
    "cut off": (
        lambda t: t.update({K_PROJ: t[K_PROJ][1:].clone()}),
        {},
        r"k_proj.weight is .*, exp",
    ),
    "other type": (
        lambda t: None,
        {"model_type": "bart"},
        "model_type='bart' and the architecture",
    ),
    "no such class": (lambda t: None, {"architectures": ["SomeModel"]}, "'SomeModel', which"),
    "not a model": (lambda t: None, {"architectures": ["pipeline"]}, "'pipeline', which"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_before_a_tensor_is_read(stored, monkeypatch, damage):
    change, settings, said = DAMAGES[damage]
    path = stored(change=change, **settings)
    reads = []
    monkeypatch.setattr(float_model, "_check_report", lambda *args: reads.append(args))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(path)
    assert not reads


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2", "mixtral"])
@pytest.mark.sampled(2)
def test_no_tensor_may_be_missing(stored, name):
    whole = load_file(stored(name) / FILE)
    for key in whole:
        path = stored(name, lambda tensors, key=key: tensors.pop(key))
        with pytest.raises(ValueError, match=r"missing|does not fit"):
            load_checkpoint(path)


def test_a_tied_head_may_be_missing_but_not_with_its_source(stored):
    path = stored("tied")
    assert "lm_head.weight" not in load_file(path / FILE)
    with pytest.raises(ValueError, match="missing"):
        load_checkpoint(stored("tied", lambda t: t.pop("model.embed_tokens.weight")))


def test_what_a_model_does_not_use_is_named(stored, caplog):
    path = stored(change=lambda t: t.update({"pooler.dense.weight": torch.ones(2, 2)}))
    with caplog.at_level(logging.WARNING, logger="quark"):
        load_checkpoint(path)
    assert "pooler.dense.weight is not used by LlamaForCausalLM" in caplog.text


OPENINGS = {
    "in memory": lambda source, target: load_checkpoint(source),
    "in parts": lambda source, target: load_checkpoint(source, max_memory=1 << 40),
    "from files to files": lambda source, target: quantize_files(
        Config(scheme("int8_wo")), source, target, ExportSettings()
    ),
}


@pytest.mark.parametrize("opening", OPENINGS)
def test_what_a_model_does_not_use_is_named_however_it_is_read(stored, caplog, tmp_path, opening):
    extra = {f"{name}.foo": torch.ones(2) for name in ("b", "model.layers.0.self_attn.q_proj")}
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}  # of old files
    path = stored(change=lambda tensors: tensors.update(extra | ignored))
    with caplog.at_level(logging.WARNING, logger="quark"):
        OPENINGS[opening](path, tmp_path / "out")
    [line] = [r.getMessage() for r in caplog.records if "not used" in r.getMessage()]
    named = "b.foo, model.layers.0.self_attn.q_proj.foo are not used by LlamaForCausalLM."
    assert line == f"{path}: {named}"
    caplog.clear()
    OPENINGS[opening](stored(), tmp_path / "whole")
    assert "not used" not in caplog.text


def test_names_of_the_model_without_its_head(stored, build, logits):
    """The first checkpoints of GPT-2 have the names of the model without the head."""

    def shorten(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    assert logits(load_checkpoint(stored("gpt2", shorten))).equal(logits(build("gpt2")))


@pytest.mark.parametrize("kind", ["deepseek_v4", "exaone_moe", "internlm3", "kimi_linear", "hy_v3"])
def test_names_that_transformers_changes_and_classes_that_it_shares(tmp_path, kind):
    model = architectures.from_config(architectures.small_config(kind))
    model.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert type(loaded) is type(model)
    state = model.state_dict()
    assert all(value.equal(state[name].to(value)) for name, value in loaded.state_dict().items())


def other_models():
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForSequenceClassification,
        LlamaModel,
        ViTConfig,
        ViTForImageClassification,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    both = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {**both, "intermediate_size": 48, "vocab_size": 64}
    parts = {f"{side}_layers": 1 for side in ("encoder", "decoder")}
    parts |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    parts |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    parts |= {"d_model": 32, "vocab_size": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return [
        LlamaModel(LlamaConfig(**sizes)),
        LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=3)),
        BertForSequenceClassification(BertConfig(**sizes)),
        BartForConditionalGeneration(BartConfig(**parts, max_position_embeddings=32)),
        WhisperForConditionalGeneration(
            WhisperConfig(**parts, **special, max_source_positions=16, max_target_positions=16)
        ),
        ViTForImageClassification(ViTConfig(**{**both, "intermediate_size": 48}, image_size=32)),
    ]


def test_the_class_is_the_one_of_the_file(tmp_path):
    for model in other_models():
        path = tmp_path / type(model).__name__
        model.save_pretrained(path)
        loaded = load_checkpoint(path)
        assert type(loaded) is type(model)
        state = loaded.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(state[name].equal(value) for name, value in model.state_dict().items())


SCALE = "model.layers.1.mlp.up_proj.weight_scale"
BROKEN = {
    "no norm": (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    "no head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no scale": (lambda t: t.pop(SCALE), "up_proj.weight_quantizer.scale is missing"),
    "integer scale": (lambda t: t.update({SCALE: t[SCALE].int()}), "scale is torch.int32"),
    "nan": (lambda t: t[SCALE].view(-1)[3:4].fill_(torch.nan), "1 of 96 scales .* such as nan"),
    "infinite": (lambda t: t[SCALE].fill_(torch.inf), "96 of 96 scales of its weight"),
    "negative": (lambda t: t[SCALE].neg_(), "96 of 96 scales of its weight"),
    "zero": (lambda t: t[SCALE].view(-1)[:2].zero_(), "2 of 96 scales of its weight"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_damaged_quantized_checkpoints(build, quantize, export, damage):
    change, said = BROKEN[damage]
    path = export(quantize(build(), "fp8_wo"))
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        load_checkpoint(path)


def test_nan_as_a_scale_in_e5m3(build, quantize, export):
    path = export(quantize(build(), "amdfp4"))
    tensors = load_file(path / FILE)
    assert tensors[SCALE].dtype == torch.uint8 and int(tensors[SCALE].max()) < 255
    tensors[SCALE][3] = 255
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"scales of its weight .* such as nan"):
        load_checkpoint(path)


def test_the_type_of_what_is_not_quantized(build, quantize, export):
    model = load_checkpoint(export(quantize(build(), "int4_wo_32")), "bfloat16")
    assert model.model.norm.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model(torch.ones(1, 4, dtype=torch.int64)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["other", "AWQ", ""])
def test_a_method_that_nobody_knows(build, quantize, export, method):
    """Transformers would take codes for weights."""
    path = export(quantize(build(), "int8_wo"))
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"]["quant_method"] = method
    (path / "config.json").write_text(json.dumps(described))
    for open_files in (load_checkpoint, check_checkpoint):
        with pytest.raises(ValueError, match="neither this package nor Transformers reads"):
            open_files(path)
