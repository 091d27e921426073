"""Bytes of the modules that stay in float."""

from torch import nn

from quark.torch.quantization import Config, QuantizationConfig
from quark.torch.report.storage import float_parts


def test_a_tied_weight_counts_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    config = Config(QuantizationConfig(), exclude=["*"])
    assert [part.bytes for part in float_parts(model, config)] == [128, 128]
    model["head"].weight = model["embedding"].weight
    embedding, head = float_parts(model, config)
    assert (embedding.bytes, head.bytes, head.parameters) == (128, 0, 0)
    assert head.reason == "has the weight of embedding"
