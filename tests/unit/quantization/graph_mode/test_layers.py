import copy

import pytest
import torch
from torch import nn

from quark.torch.quantization.graph_mode.float_graph import independent_copy
from quark.torch.quantization.graph_mode.layers import raise_layers
from tests.unit.quantization.graph_mode.networks import NETWORKS, export, images, network

EXPECTED = {
    "resnet": {
        "stem": nn.Conv2d,
        **{f"blocks.{i}.conv{n}": nn.Conv2d for i in range(2) for n in (1, 2)},
        "head": nn.Linear,
    },
    "mobilenet": {
        **dict.fromkeys(("features.0", "features.3", "features.6", "features.9"), nn.Conv2d),
        "classifier.1": nn.Linear,
    },
    "transformer": {
        "patches": nn.Conv2d,
        **dict.fromkeys(("qkv", "proj", "mlp.0", "mlp.2", "head"), nn.Linear),
    },
    "unet": {
        **dict.fromkeys(("down", "bottom", "out"), nn.Conv2d),
        "up": nn.ConvTranspose2d,
    },
}


def layers_of(graph):
    return {n: type(m) for n, m in graph.named_modules() if type(m) is not nn.Module and n}


def raised(model, *args):
    return raise_layers(independent_copy(export(model, *args)))


@pytest.mark.parametrize(
    ("name", "decomposed"),
    [*((name, False) for name in NETWORKS), ("resnet", True), ("transformer", True)],
)
def test_layers_have_the_names_of_the_model_and_its_bits(name, decomposed):
    model, x = network(name), images(1)[0]
    program = torch.export.export(model, (x,))
    graph = (program.run_decompositions({}) if decomposed else program).module()
    layers = raise_layers(independent_copy(graph))
    assert layers_of(layers) == EXPECTED[name]
    with torch.no_grad():
        assert torch.equal(layers(x), graph(x))
    assert dict(layers.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_the_graph_given_keeps_its_nodes_and_its_parameters():
    graph = export(network("resnet"))
    code, parameters = graph.code, dict(graph.named_parameters())
    layers = raise_layers(independent_copy(graph))
    layers.stem.weight.data.zero_()
    assert graph.code == code
    assert all(parameters[n] is p for n, p in graph.named_parameters())
    assert graph.stem.weight.abs().sum() > 0
    with pytest.raises(NotImplementedError):
        graph.eval()


def test_options_of_convolutions_are_kept():
    class Options(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(4, 6, (3, 2), (2, 1), padding="valid", dilation=(1, 2), groups=2)
            self.b = nn.Conv2d(6, 6, 3, padding="same", groups=6, padding_mode="zeros")
            self.c = nn.Conv1d(6, 8, 3, stride=2)
            self.d = nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2, dilation=2)

        def forward(self, x):
            y = self.b(self.a(x))
            z = self.c(y.flatten(2))
            return self.d(z.unsqueeze(-1))

    model, x = Options().eval(), torch.randn(2, 4, 9, 9)
    graph = raised(model, x)
    assert layers_of(graph) == {
        "a": nn.Conv2d,
        "b": nn.Conv2d,
        "c": nn.Conv1d,
        "d": nn.ConvTranspose2d,
    }
    assert graph.a.groups == 2 and graph.a.in_channels == 4 and graph.d.out_channels == 6
    with torch.no_grad():
        assert torch.equal(graph(x), model(x))


class Twice(nn.Module):
    """A layer that runs twice, and its weight in another operator."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=3)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.inner(self.inner(self.embed(ids)).tanh()))


def test_a_layer_that_runs_twice_is_one_and_tied_weights_stay_tied():
    model, ids = Twice().eval(), torch.arange(6).reshape(2, 3)
    graph = raised(model, ids)
    calls = [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]
    assert calls.count("inner") == 2 and len(calls) == 4
    embed, head = (graph.get_submodule(n) for n in (calls[0], calls[-1]))
    assert type(embed) is nn.Embedding and embed.padding_idx == 3 and type(head) is nn.Linear
    assert embed.weight is head.weight and {"embed", "head"} == {calls[0], calls[-1]}
    assert torch.equal(graph(ids), model(ids))


def test_packed_projections_of_attention_become_a_layer():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=False)[0]

    model, x = Attention().eval(), torch.randn(2, 5, 16)
    graph = raised(model, x)
    assert layers_of(graph) == {"attn.in_proj": nn.Linear, "attn.out_proj": nn.Linear}
    assert "attn.in_proj_weight" not in graph.state_dict()
    assert torch.equal(graph(x), model(x))


def test_a_weight_that_is_computed_stays_with_its_operator():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return nn.functional.linear(x, self.fc.weight * 2, self.fc.bias)

    model, x = Scaled().eval(), torch.randn(2, 8)
    graph = raised(model, x)
    assert layers_of(graph) == {} and torch.equal(graph(x), model(x))


def test_copies_train_and_evaluate():
    graph = raised(network("unet"))
    copied = copy.deepcopy(graph).train()
    assert copied.training and copied.down.training and not graph.training
    loss = copied(images(1)[0]).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in copied.parameters())
