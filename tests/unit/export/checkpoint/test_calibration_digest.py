"""A checkpoint has the digest of the data that it was calibrated with."""

import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quark.cli.main import main
from quark.torch import ModelImporter, ModelQuantizer, collect_statistics
from quark.torch.pipeline.statistics import data_digest
from tests.configurations import preset, quantized

KEY = "calibration_sha256"


def written(path):
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def test_digest_is_written_kept_and_shown(build, batches, export, logits, capsys):
    model = quantized(build(), preset("int8"), batches)
    path = export(model)
    digest = written(path)[KEY]
    assert digest == data_digest(batches) and KEY not in written(path)["quantization_config"]
    assert digest != data_digest(batches[:1])
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(logits(loaded), logits(model))
    again = export(ModelImporter(path).import_model_info(build()))
    assert written(again).get(KEY) in (digest, None)
    with pytest.raises(SystemExit, match="0"):
        main(["inspect", str(path)])
    assert digest in capsys.readouterr().out.replace("\n", "")


def test_data_that_is_not_used_is_not_written(build, batches, export):
    assert KEY not in written(export(quantized(build(), preset("int8_wo"))))
    assert KEY not in written(export(quantized(build(), preset("int8_wo"), batches)))


def test_statistics_have_the_digest_of_their_data(build, batches, export):
    statistics = collect_statistics(build(), batches, probes=0)
    model = ModelQuantizer(preset("int8")).quantize_model(build(), None, statistics)
    assert written(export(ModelQuantizer.freeze(model)))[KEY] == statistics.data


def test_the_size_of_the_batches_does_not_matter():
    ids = torch.arange(24).view(6, 4)
    named = [{"input_ids": rows, "attention_mask": rows > 3} for rows in ids.split(1)]
    joined = [{"attention_mask": ids[:4] > 3, "input_ids": ids[:4]}, *named[4:]]
    for single, other in ((ids.split(1), ids.split(4)), (named, joined), (named, [named])):
        assert data_digest(single) == data_digest(other) != data_digest(single[:5])
    assert data_digest(ids.split(1)) != data_digest(ids.view(12, 2).split(1))


def test_a_model_without_a_configuration(export):
    data = [torch.ones(2, 8)]
    model = quantized(nn.Sequential(nn.Linear(8, 8)), preset("int8"), data)
    assert written(export(model))[KEY] == data_digest(data)
