"""Dropout in evaluation mode is removed."""

import pytest
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.graph_mode.passes.preparation import prepare


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout])
def test_dropout_does_not_keep_a_batch_norm_from_its_layer(net, export, operations, image, kind):
    members = {"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6), "drop": kind(inplace=True)}
    model = net(lambda m, x: m.norm(m.drop(m.conv(x))), **members)
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"conv2d": 1}


def test_dropout_that_is_on_stays(net, export, operations, image, caplog):
    model = net(lambda m, x: F.dropout(m.conv(x), training=True), conv=nn.Conv2d(4, 6, 3))
    with caplog.at_level("INFO"):
        graph = prepare(export(model, image), image)
    assert operations(graph) == {"conv2d": 1, "dropout": 1}
    assert "dropout is left as it is: it is on" in caplog.text
