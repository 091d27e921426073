"""All passes in turn: proofs, undone rewrites, and what happens to the given graph."""

import pytest
import torch
from torch import nn

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.float_graph import independent_copy
from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    insert_tensor,
    is_call,
    set_arguments,
)
from quark.torch.quantization.graph_mode.passes.preparation import prepare
from quark.torch.quantization.graph_mode.passes.proof import Proof, two_samples
from quark.torch.quantization.graph_mode.passes.rewriting import (
    Candidates,
    Pass,
    apply_pass,
    apply_passes,
)


def scale(graph, node, factor):
    """Multiply the weight of a layer."""
    weight = arguments(node)["weight"]
    value = graph.get_parameter(weight.target)
    new = nn.Parameter(value.detach() * factor)
    set_arguments(node, weight=insert_tensor(graph, node, weight.target, new))
    return node


def scaling(factors):
    """A pass that multiplies the weight of each convolution by a factor."""

    def find(graph, options):
        nodes = [n.name for n in graph.graph.nodes if is_call(n, "conv2d")]
        return Candidates([n for n in nodes if n in factors], {})

    return Pass("scale", find, lambda graph, node, options: scale(graph, node, factors[node.name]))


@pytest.fixture
def two(net):
    members = {"first": nn.Conv2d(4, 4, 3), "second": nn.Conv2d(4, 4, 3)}
    return net(lambda m, x: m.second(m.first(x).relu()), **members)


def test_only_the_rewrites_that_hold_stay(export, two, image, caplog):
    graph = export(two, image)
    weights = {n: p.clone() for n, p in graph.named_parameters()}
    result = apply_pass(
        graph,
        scaling({"conv2d": 1.0 + 1e-6, "conv2d_1": 1.01}),
        Proof(graph, (image,)),
        PassOptions(),
    )
    assert not torch.equal(result.first.weight, graph.first.weight)
    assert result.second.weight is graph.second.weight
    for name, parameter in graph.named_parameters():
        assert torch.equal(parameter, weights[name])
    assert "scale: conv2d_1 is left as it is: conv2d_1 changes by" in caplog.text


def test_a_rewrite_that_no_output_shows_is_found(export, net, image):
    """The output is zero, so only the value of the node itself tells."""
    model = net(lambda m, x: m.conv(x) * 0, conv=nn.Conv2d(4, 4, 3))
    graph = export(model, image)
    result = apply_pass(graph, scaling({"conv2d": 2.0}), Proof(graph, image), PassOptions())
    assert result.conv.weight is graph.conv.weight


def test_a_rewrite_that_only_zeros_hide_is_found(export, net):
    """The example is zero everywhere: random inputs show the change."""
    model = net(lambda m, x: m.conv(x), conv=nn.Conv2d(4, 4, 3, bias=False))
    graph, image = export(model, torch.zeros(1, 4, 5, 5)), torch.zeros(1, 4, 5, 5)
    result = apply_pass(graph, scaling({"conv2d": 2.0}), Proof(graph, image), PassOptions())
    assert result.conv.weight is graph.conv.weight


def test_a_rewrite_that_fails_is_undone(export, two, image, caplog):
    def broken(graph, node, options):
        set_arguments(node, groups=3)
        return node

    kind = Pass("break", scaling({"conv2d": 1}).find, broken)
    graph = export(two, image)
    assert apply_pass(graph, kind, Proof(graph, image), PassOptions()) is graph
    assert "conv2d is left as it is: the rewritten graph fails: RuntimeError" in caplog.text


def test_passes_are_proved_together_or_else_one_by_one(export, two, image):
    """The second pass breaks what the first one returns: the first one stays."""
    graph = export(two, image)
    runs = []

    class CountedProof(Proof):
        def find_difference(self, *arguments):
            runs.append(arguments)
            return super().find_difference(*arguments)

    kinds = [scaling({"conv2d": factor}) for factor in (1 + 1e-6, 1 - 1e-6)]
    result = apply_passes(graph, kinds, CountedProof(graph, image), PassOptions())
    assert len(runs) == 1 and result.first.weight is not graph.first.weight
    kinds = [scaling({"conv2d": 1 + 1e-6}), scaling({"conv2d": 2.0})]
    result = apply_passes(graph, kinds, CountedProof(graph, image), PassOptions())
    assert len(runs) == 4
    assert torch.allclose(result.first.weight, graph.first.weight, rtol=1e-5)
    assert result.first.weight is not graph.first.weight


def test_the_given_graph_is_unchanged(export, net, image):
    model = net(
        lambda m, x: m.drop(m.norm(m.conv(x))),
        **{"conv": nn.Conv2d(4, 6, 3), "norm": nn.BatchNorm2d(6), "drop": nn.Dropout()},
    )
    graph = export(model, image)
    code, output = graph.code, graph(image)
    members = {name: id(tensor) for name, tensor in graph.state_dict(keep_vars=True).items()}
    prepare(graph, image)
    assert graph.code == code
    assert torch.equal(graph(image), output)
    now = {name: id(tensor) for name, tensor in graph.state_dict(keep_vars=True).items()}
    assert now == members


def test_checks_of_inputs_stay(export, two, image):
    graph = prepare(export(two, image), image)
    with pytest.raises((AssertionError, RuntimeError)):
        graph(torch.randn(3, 4, 6, 6))


@pytest.mark.parametrize("kind", ["tensor", "tuple", "keywords"])
def test_example_inputs_of_each_kind(export, net, image, kind):
    model = net(lambda m, x: m.conv(x), conv=nn.Conv2d(4, 6, 3))
    given = {"tensor": image, "tuple": (image,), "keywords": {"x": image}}[kind]
    args, kwargs = ((), given) if kind == "keywords" else ((image,), {})
    graph = torch.export.export(model, args, kwargs).module()
    result = prepare(graph, given)
    torch.testing.assert_close(result(*args, **kwargs), model(image))


def test_keywords_beside_arguments(image):
    class Two(nn.Module):
        def forward(self, x, *, factor, offset):
            return x.relu() * factor + offset

    kwargs = {"factor": torch.tensor(2.0), "offset": torch.tensor([3.0])}
    graph = torch.export.export(Two(), (image,), kwargs).module()
    result = prepare(graph, {**dict(reversed(kwargs.items())), "x": image})
    torch.testing.assert_close(result(image, **kwargs), image.relu() * 2 + 3)
    with pytest.raises(ValueError, match="do not fit the graph"):
        prepare(graph, {"x": image, "factor": torch.tensor(2.0)})


def test_inputs_that_do_not_fit_are_refused(export, two, image):
    graph = export(two, image)
    with pytest.raises(ValueError, match=r"(?s)do not fit the graph.*got 2 arguments"):
        prepare(graph, (image, image))
    with pytest.raises(ValueError, match="does not run on the example inputs"):
        prepare(graph, torch.randn(2, 3, 6, 6))


def test_dead_code_is_removed(export, net, operations, image):
    def function(m, x):
        m.unused(x)
        return m.conv(x)

    model = net(function, conv=nn.Conv2d(4, 6, 3), unused=nn.Conv2d(4, 6, 3))
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"conv2d": 1}
    assert {n for n, _ in graph.named_parameters()} == {"conv.weight", "conv.bias"}


def test_buffers_that_a_run_writes_to_keep_their_values(export, net, image):
    def function(m, x):
        m.count.add_(1)
        return m.conv(x) + m.count

    model = net(function, conv=nn.Conv2d(4, 6, 3))
    model.register_buffer("count", torch.zeros(1))
    graph = export(model, image)
    result = prepare(graph, image)
    assert float(graph.count) == 0
    first, second = result(image), result(image)
    torch.testing.assert_close(second - first, torch.ones_like(first))


class Rows(nn.Module):
    def __init__(self, joins):
        super().__init__()
        self.joins, self.fc = joins, nn.Linear(4, 3)

    def forward(self, x):
        y = self.fc(x)
        return y - y.mean(0) if self.joins else y


@pytest.mark.parametrize("joins", [False, True])
def test_two_samples_stand_for_a_batch_of_independent_rows(joins):
    x = torch.randn(6, 4)
    graph = torch.export.export(Rows(joins).eval(), (x,)).module()
    copied = independent_copy(graph)
    samples = two_samples(copied, [x], ["linear"])
    if joins:
        assert samples is None
    else:
        [both] = samples.inputs
        assert torch.equal(
            samples.values.nodes["linear"],
            nn.functional.linear(both, copied.fc.weight, copied.fc.bias),
        )
        assert both.shape == (2, 4) and torch.equal(both[0], x[0])
        assert not torch.isin(both[1], x).any()


def test_a_graph_of_a_fixed_batch_has_no_samples():
    x = torch.randn(6, 4)
    graph = torch.export.export(nn.Unflatten(0, (2, 3)), (x,)).module()
    assert two_samples(independent_copy(graph), [x]) is None
    assert two_samples(independent_copy(graph), [x[:2]]) is None
