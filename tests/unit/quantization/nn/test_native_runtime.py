"""Models whose layers take kernels of numba: graphs of ``torch.compile``, generation."""

import pytest
import torch

from quark.torch import set_runtime
from quark.torch.export.recognition import load_checkpoint
from quark.torch.numerics.native import compilation
from quark.torch.numerics.native.vectors import FEATURE
from quark.torch.quantization.nn.runtime import describe_runtime
from tests.configurations import preset
from tests.unit.quantization.nn.test_runtime import Counter

pytest.importorskip("numba")


@pytest.fixture(params=["int4_wo_32", "int3_wo_32", "mxfp4", "fp8"])
def model(request, build, quantize, export, monkeypatch):
    """A loaded model of three blocks in the runtime ``fast``, with kernels for small weights."""
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    name = request.param
    model = load_checkpoint(export(quantize(build(num_hidden_layers=3), preset(name)))).eval()
    set_runtime(model, "fast")
    decoders = {
        layer.packed_product.method.decoder for layer in model.modules() if has_product(layer)
    }
    # The order of the 4-bit kernel of torch needs vectors.
    is_native = name != "int4_wo_32" or compilation.has_feature(FEATURE)
    assert decoders == {"native" if is_native else "panels"}
    torch._dynamo.reset()
    return model


def has_product(layer):
    return getattr(layer, "packed_product", None) is not None


@pytest.mark.sampled(4)
def test_one_graph_without_breaks(model):
    ids, counter = torch.randint(3, 64, (2, 10)), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(ids).logits, model(ids).logits)
    assert len(counter.graphs) == 1


@pytest.mark.sampled(4)
def test_blocks_share_a_graph(model):
    counter = Counter()
    for block in model.model.layers:
        block.mlp.compile(fullgraph=True, backend=counter, dynamic=False)
    with torch.no_grad():
        model(torch.randint(3, 64, (2, 10)))
    assert len(counter.graphs) == 1


@pytest.mark.sampled(4)
def test_generation_compiles_nothing_more(model):
    ids = torch.randint(3, 64, (1, 6))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    tokens, names = model.generate(ids, **options), describe_runtime(model)
    model.generation_config.cache_implementation = "static"
    model.forward = torch.compile(model.forward, backend=Counter())
    assert torch.equal(model.generate(ids, **options), tokens)
    assert describe_runtime(model) == names
