"""A finish of a model that is read in parts: the same bits as in memory."""

import pytest
import torch

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.distillation import DistillationOptions, copy_of, distill
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.journal import Journal, PassFiles
from quark.torch.quantization.config.presets import scheme
from tests.configurations import preset
from tests.models.test_streamed import contents, in_memory, streamed

IDS = torch.randint(3, 64, (9, 16), generator=torch.Generator().manual_seed(5))
BATCHES = list(IDS.split(3))
OPTIONS = DistillationOptions(steps=30, interval=5, batch_size=1, patience=9)


@pytest.fixture
def saved(build, tmp_path):
    """Write a float model to files; return their directory."""

    def saved(name="llama", dtype=torch.float32, **options):
        build(name=name, **options).to(dtype).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return saved


def finished(load, source, target, layer, journal=None):
    """What a finish reports, and the files of the result."""
    quantizer = ModelQuantizer(preset(layer), journal=journal)
    model = quantizer.freeze(quantizer.quantize_model(load(source), BATCHES))
    result = distill(model, load(source), BATCHES, OPTIONS, journal=journal)
    ModelExporter(None, target).export_safetensors_model(model)
    return result, contents(target)


CASES = {
    "int3, llama": ("int3_wo_32", "llama", torch.float32),
    "int3, bfloat16": ("int3_wo_32", "llama", torch.bfloat16),
    "uint4, biases": ("uint4_wo_32", "gpt2", torch.float32),
    "nvfp4, inputs rounded": ("nvfp4", "llama", torch.float32),
    "mxfp4, norms and biases": ("mxfp4", "gpt2", torch.bfloat16),
}


@pytest.mark.parametrize(("name", "kind", "dtype"), CASES.values(), ids=CASES)
def test_parts_give_the_bits_of_the_whole(name, kind, dtype, saved, tmp_path):
    source, layer = saved(kind, dtype), scheme(name)
    expected = finished(in_memory, source, tmp_path / "whole", layer)
    found = finished(streamed, source, tmp_path / "parts", layer)
    assert expected[0].best and found == expected


def test_either_model_may_be_in_memory(saved, tmp_path):
    source, found = saved(), []
    for load, load_original in ((in_memory, streamed), (streamed, in_memory)):
        model = load(source)
        model = ModelQuantizer.freeze(ModelQuantizer(preset("int3_wo_32")).quantize_model(model))
        found.append(distill(model, load_original(source), BATCHES, OPTIONS))
    assert found[0] == found[1] and found[0].best


def test_parts_leave_the_memory(saved):
    """One unit at a time is in memory, and the original has none while the model trains."""
    source = saved()
    model, original = streamed(source), streamed(source)
    model = ModelQuantizer.freeze(ModelQuantizer(preset("int3_wo_32")).quantize_model(model))
    for each in (model, original):
        residency_of(each).release()
        residency_of(each).peak = 0
    distill(model, original, BATCHES, OPTIONS)
    for each in (model, original):
        residency = residency_of(each)
        whole = sum(map(residency._size_of, residency.units.values()))
        assert residency.peak <= 2 * residency.largest < whole
    assert not residency_of(original)._sizes


def test_a_killed_finish_goes_on_to_the_same_bits(saved, tmp_path, monkeypatch):
    source, layer = saved(), scheme("int3_wo_32")
    expected = finished(in_memory, source, tmp_path / "whole", layer)
    write = PassFiles.write

    def stop(self, block, *arguments):
        write(self, block, *arguments)
        if block == "10":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PassFiles, "write", stop)
        with Journal(tmp_path / "journal") as journal:
            finished(streamed, source, tmp_path / "parts", layer, journal)
    with Journal(tmp_path / "journal") as journal:
        assert journal.describe() == "the last measured step"
        found = finished(streamed, source, tmp_path / "parts", layer, journal)
    assert found == expected


def test_copies_are_refused(saved):
    with pytest.raises(ValueError, match="Load the original a second time"):
        copy_of(streamed(saved()))
