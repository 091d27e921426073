"""The files of a quantized model are the same however it is read and its data is cut."""

import hashlib

import pytest
import torch

from quark.torch import ModelExporter
from quark.torch.export.containers.base import ExportSettings
from quark.torch.export.file_to_file import quantize_files
from quark.torch.export.recognition import load_checkpoint
from tests.configurations import preset, quantized
from tests.models.test_streamed import streamed
from tests.unit.quantization.same_bits import WAYS, config_of, cut, data, model_of

FAMILIES = ("llama", "mixtral", "bart", "t5")
# Rotations are refused there.
LEFT = {(f, way) for f in ("bart", "t5") for way in ("rotation and gptq", "online rotation")}
SEQUENCES = 9  # two chunks of 2048 tokens
QUICK = [("mixtral", "static"), ("llama", "rotation and gptq")]
CASES = [
    pytest.param(family, way, marks=[] if (family, way) in QUICK else pytest.mark.nightly)
    for family in FAMILIES
    for way in WAYS
    if (family, way) not in LEFT
]
SHARDS = "20KB"


def digests(directory):
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.iterdir())
    }


def test_learned_rounding_of_parameters_that_need_no_gradient():
    """Parameters of a streamed model need none. T5 computes its bias of attention from one."""
    states = []
    for needs_gradient in (True, False):
        model = model_of("t5").to(torch.bfloat16).requires_grad_(needs_gradient)
        states.append(quantized(model, config_of("autoround"), data("t5", 1)).state_dict())
    first, second = states
    assert not [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def test_stored_buffers_of_a_streamed_model(tmp_path):
    """BART has a buffer outside of all modules with parameters."""
    model_of("bart").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = streamed(tmp_path / "model")
    model.final_logits_bias.fill_(0.5)
    ModelExporter(None, tmp_path / "out").export_safetensors_model(
        quantized(model, preset("int8_wo"))
    )
    batch = data("bart", 1)[0]
    expected = load_checkpoint(tmp_path / "out")
    parts = load_checkpoint(tmp_path / "out", max_memory=1 << 40)
    with torch.no_grad():
        assert torch.equal(parts(**batch).logits, expected(**batch).logits)
    assert bool((expected.final_logits_bias == 0.5).all())


@pytest.mark.parametrize(("family", "way"), CASES)
def test_files(family, way, tmp_path):
    source = tmp_path / "model"
    model_of(family).to(torch.bfloat16).save_pretrained(source)
    batches = data(family, SEQUENCES)

    def files(name, load, batches):
        model = quantized(load(source), config_of(way), batches)
        ModelExporter(None, tmp_path / name).export_safetensors_model(model, max_shard_size=SHARDS)
        return digests(tmp_path / name)

    expected = files("in memory", load_checkpoint, batches)
    assert sum(name.endswith(".safetensors") for name in expected) > 1
    assert files("batches of 7", load_checkpoint, cut(batches, 7)) == expected
    assert files("streamed, batches of 2", streamed, cut(batches, 2)) == expected
    if way == "to nearest":
        settings = ExportSettings(max_shard_size=SHARDS)
        quantize_files(config_of(way), source, tmp_path / "files", settings)
        assert digests(tmp_path / "files") == expected
