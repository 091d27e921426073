"""Models of the Hub by name: their headers are checked in its cache, as those of a directory."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quark.torch import ModelQuantizer, export_safetensors
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config

IDS = torch.arange(3, 19).unsqueeze(0)
NAME = "owner/model"


def exported(kind, path):
    """Write a small model whose experts stay in float; return it."""
    model = build(small_config(kind), torch.float32)
    config = Config(scheme("fp8"), exclude=["lm_head", "*experts*"])
    ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [IDS]))
    export_safetensors(model, path)
    return model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Put a directory into the cache of the Hub, as a revision of a model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub/models--owner--model"

    def publish(path, commit="0" * 40):
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs/main").write_text(commit)
        shutil.copytree(path, folder / "snapshots" / commit, dirs_exist_ok=True)

    return publish


def load():
    return AutoModelForCausalLM.from_pretrained(NAME, local_files_only=True)


def rewrite(path, change):
    """Change the tensors of a checkpoint."""
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def test_single_numbers_of_any_shape_and_experts_in_float(hub, tmp_path):
    """Some tools store a scale per tensor as [1] instead of []."""
    model = exported("mixtral", tmp_path / "out")
    rewrite(
        tmp_path / "out",
        lambda tensors: {n: t.reshape(1) if t.dim() == 0 else t for n, t in tensors.items()},
    )
    hub(tmp_path / "out")
    assert torch.equal(load()(IDS).logits, model(IDS).logits)


def test_tensors_that_do_not_fit(hub, tmp_path):
    exported("llama", tmp_path / "out")
    name = "model.norm.weight"
    damages = {
        f"{name} is missing": lambda tensors: {n: t for n, t in tensors.items() if n != name},
        rf"{name} is torch.int32 \[": lambda tensors: {**tensors, name: tensors[name].int()},
        "layers.7.b is unexpected": lambda t: {**t, "model.layers.7.b": torch.ones(1)},
    }
    sound = load_file(tmp_path / "out/model.safetensors")
    for message, damage in damages.items():
        rewrite(tmp_path / "out", lambda _, damage=damage: damage(sound))
        hub(tmp_path / "out")
        with pytest.raises(ValueError, match=message):
            load()


@torch.no_grad()
def test_revisions_in_the_cache(hub, tmp_path):
    """Other revisions are not compared: with the same headers, or with other configurations."""
    model = exported("llama", tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "old")
    config = tmp_path / "old/config.json"
    config.write_text(config.read_text().replace('"lm_head"', '"model.layers.0.*"'))
    (tmp_path / "old/model.safetensors").write_bytes(b"damaged")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text("{")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"")
    for commit, path in enumerate(["damaged", "old", "out", "out"]):
        hub(tmp_path / path, str(commit) * 40)
    assert torch.equal(load()(IDS).logits, model(IDS).logits)
    rewrite(tmp_path / "out", lambda tensors: {n: t for n, t in tensors.items() if "norm" not in n})
    hub(tmp_path / "out", "2" * 40)
    hub(tmp_path / "out", "3" * 40)
    with pytest.raises(ValueError, match=r"norm\.weight and .* missing"):
        load()
