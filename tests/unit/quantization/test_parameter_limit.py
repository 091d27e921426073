"""Parameters of a streamed model leave room for the work of the algorithms."""

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from quark.torch.quantization.config.algo import GPTQConfig
from tests.configurations import preset
from tests.models.architectures import build, small_config

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path):
    build(small_config("llama"), torch.float32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("algorithms", "takes"), [((), 0), ((GPTQConfig(),), 1)])
def test_algorithms_leave_less_to_parameters(directory, algorithms, takes):
    model = stream_model(directory)
    residency = residency_of(model)
    residency.room, residency.limit = 72 * MIB, 36 * MIB
    batches = [torch.arange(32).view(1, 32)] if algorithms else None
    ModelQuantizer(preset("int4_wo_32", *algorithms)).quantize_model(model, batches)
    # Of 72 MiB, 64 are kept for imports; the rest is for the work, and for parameters.
    assert residency.limit == 36 * MIB if not takes else residency.limit < 8 * MIB


def test_a_limit_that_is_less_stays(directory):
    model = stream_model(directory)
    residency_of(model).limit = 5
    config = preset("int4_wo_32", GPTQConfig())
    ModelQuantizer(config).quantize_model(model, [torch.arange(32).view(1, 32)])
    assert residency_of(model).limit == 5
