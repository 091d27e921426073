"""``quark quantize --finish distill``: what trains, what judges, and what is refused."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelQuantizer
from quark.torch.distillation import DistillationOptions, distill
from quark.torch.pipeline.batches import split_sequences


def test_finish(quantize, monkeypatch):
    few = partial(distill, options=DistillationOptions(steps=30))
    monkeypatch.setattr("quark.torch.distillation.distill", few)
    flags = ["--quant_scheme", "int3_wo_32", "--num_calib_data", 8, "--seq_len", 32, "--json"]
    plain, _ = quantize(*flags)
    before = load_file(plain / "model.safetensors")
    path, said = quantize(*flags, "--overwrite", "--finish", "distill")
    found = json.loads(said[said.index("{") :])["finish"]
    assert found["after"] < found["before"] and found["best"]
    after = load_file(path / "model.safetensors")
    changed = {
        name.rpartition(".")[2] for name in after if not torch.equal(before[name], after[name])
    }
    assert changed == {"weight_scale", "weight"}  # of layers and of norms
    assert all("norm" in n for n in after if n.endswith("weight") and before[n].ne(after[n]).any())


def test_algorithms_do_not_see_the_text_that_judges_a_finish(quantize, monkeypatch):
    seen, few = [], partial(distill, options=DistillationOptions(steps=1))
    monkeypatch.setattr("quark.torch.distillation.distill", few)
    plain = ModelQuantizer.quantize_model

    def record(self, model, batches, *rest):
        seen.extend(split_sequences(batches))
        return plain(self, model, batches, *rest)

    monkeypatch.setattr(ModelQuantizer, "quantize_model", record)
    flags = ["--quant_scheme", "int3_wo_32", "--quant_algo", "gptq", "--num_calib_data", 16]
    _, said = quantize(*flags, "--seq_len", 32, "--json", "--finish", "distill")
    assert len(seen) == 14  # an eighth is kept back
    assert json.loads(said[said.index("{") :])["finish"]["steps"] == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num_calib_data", "1"], "one sequence trains and another one judges"),
        (["--max_memory", "1GB"], "gradients need the whole model"),
        (["--statistics", "x"], "statistics have no text"),
        (["--quant_flow", "file2file", "--skip_evaluation"], "--finish needs the model in memory"),
    ],
)
def test_a_finish_that_does_not_fit(flags, said, refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--finish", "distill"]
    assert said in refused("quantize", *place, "--quant_scheme", "int8_wo", *flags)
