"""A config.json cannot make us build what its files cannot hold."""

import json
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from quark.torch import import_model_from_safetensors
from quark.torch.export.checkpoint import build_limit
from quark.torch.export.checkpoint.architecture import made_config
from quark.torch.export.checkpoint.build_limit import check_counts, limit_build
from quark.torch.export.recognition import load_checkpoint

SECONDS = 30
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 16}
BART = {
    "d_model": 8,
    "vocab_size": 16,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 8),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1),
    "max_position_embeddings": 16,
}
MODELS = {
    "llama": {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1},
    "mixtral": {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1, "num_local_experts": 2},
    "qwen2": {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1},
    "bart": BART,
}
HOSTILE = [
    ("llama", {"num_hidden_layers": 10**9}),
    ("llama", {"num_hidden_layers": 50_000}),
    ("llama", {"intermediate_size": 10**12}),
    ("llama", {"vocab_size": 10**15}),
    ("bart", {"decoder_layers": 10**9}),
    ("bart", {"decoder_layers": 60_000}),
    ("bart", {"encoder_layers": 10**9}),
    ("mixtral", {"num_local_experts": 4000, "num_hidden_layers": 4000}),
    ("qwen2", {"num_hidden_layers": 10**10}),
]


@contextmanager
def time_limit():
    """Fail rather than hang."""

    def stop(*_):
        raise TimeoutError(f"{SECONDS} s are over")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(build, tmp_path_factory):
    """Save a small float model, as safetensors or as pytorch_model.bin."""

    def saved(kind, is_pickled):
        from transformers import AutoConfig, AutoModelForCausalLM

        path = tmp_path_factory.mktemp(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
        if is_pickled:
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(path)
            torch.save(model.state_dict(), path / "pytorch_model.bin")
        else:
            model.save_pretrained(path)
        return path

    return saved


def change(path, changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("is_pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize(("kind", "changes"), HOSTILE, ids=str)
def test_float_models(saved, kind, changes, is_pickled):
    path = saved(kind, is_pickled)
    change(path, changes)
    said = r"no model has more|more (elements|parameters|modules) than|cannot build"
    with time_limit(), pytest.raises(ValueError, match=said):
        load_checkpoint(path)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("is_pickled", [False, True], ids=["safetensors", "bin"])
def test_sound_models_load(saved, kind, is_pickled):
    path = saved(kind, is_pickled)
    assert sum(p.numel() for p in load_checkpoint(path).parameters()) > 0


@pytest.mark.parametrize("count", [10**9, 50_000])
def test_quantized_models(build, quantize, export, count):
    path = export(quantize(build(), "int8_wo"))
    change(path, {"num_hidden_layers": count})
    with time_limit(), pytest.raises(ValueError, match=r"no model has more|than its files"):
        import_model_from_safetensors(None, path)


def test_a_description_of_parameters(tmp_path):
    with pytest.raises(ValueError, match=r"num_hidden_layers=1000000000, but no model"):
        made_config({"model_type": "qwen2", "num_hidden_layers": 10**9}, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers="),
        ({"depths": [2, 2, 10**9]}, "depths.2=1000000000"),
        ({"decoder_layers": 1 << 17}, "decoder_layers=131072"),
        ({"llama.block_count": 10**9}, "llama.block_count="),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9, but num_"),
        ({"a": {"num_experts": 4, "experts_per_token": 5}}, "experts_per_token=5, but num_exp"),
    ],
)
def test_counts(config, said):
    with pytest.raises(ValueError, match=said):
        check_counts(config, "config.json")


def test_sizes_are_not_counts():
    check_counts({"shared_expert_intermediate_size": 10**6, "rope_theta": 10**9}, "")
    check_counts({"num_experts": 1, "num_experts_per_tok": 2}, "")  # a model without experts
    check_counts({"num_experts": 8, "num_experts_per_tok": 8}, "")
    check_counts({"vocab_size": 256_000, "max_position_embeddings": 10**7, "n_embd": 10**5}, "")


def test_nesting():
    config = {}
    for _ in range(500):
        config = {"a": config}
    with pytest.raises(ValueError, match="nested more than"):
        check_counts(config, "config.json")


class TestLimit:
    @pytest.mark.parametrize("what", ["elements", "parameters", "modules"])
    def test_building_stops(self, monkeypatch, what):
        for name in ("ELEMENTS", "TENSORS", "MODULES"):
            monkeypatch.setattr(build_limit, f"_SPARE_{name}", 10**6)
        name = "TENSORS" if what == "parameters" else what.upper()
        monkeypatch.setattr(build_limit, f"_SPARE_{name}", 10)
        made = []
        with pytest.raises(ValueError, match=f"more {what} than"), limit_build({}, "x"):
            for _ in range(100):
                made.append(nn.Sequential(nn.Linear(1, 1)))
        assert 0 < len(made) < 12

    def test_nothing_is_counted_afterwards(self, monkeypatch):
        monkeypatch.setattr(build_limit, "_SPARE_TENSORS", 3)
        with limit_build({}, "x"):
            nn.Linear(1, 1)
        for _ in range(10):
            nn.Linear(1, 1)
