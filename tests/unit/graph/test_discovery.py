"""What is found in small modules, where it can be told by hand what is right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.recognition import load_checkpoint
from quark.torch.graph.discovery import discover


def linear(inputs, outputs, bias=True):
    return nn.Linear(inputs, outputs, bias=bias)


def weight(*shape):
    return nn.Parameter(torch.empty(shape))


def pair(**members):
    """Two linear layers of 6 → 8 → 6 features."""
    return {"a": linear(6, 8), "b": linear(8, 6), **members}


def normed(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def into_slices(m, x):
    whole = x.new_zeros(*x.shape[:-1], 8)
    whole[..., :3] = m.c(x)
    whole[..., 3:] = m.a(x)
    return m.b(whole)


def grouped_heads(m, x):
    q = m.q(x).view(3, 5, 4, 2).transpose(1, 2)
    k, v = (m(x).view(3, 5, 2, 2).transpose(1, 2) for m in (m.k, m.v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return m.o(y.transpose(1, 2).reshape(3, 5, 8))


def interleaved_heads(m, x):
    q, k, v = m.qkv(x).view(3, 5, 2, 3, 4).unbind(-2)  # (…, heads, size)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return m.o(torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(3, 5, 8))


_ATTENTION = {
    "q": linear(6, 8),
    "k": linear(6, 4),
    "v": linear(6, 4),
    "o": linear(8, 6),
}
# What is computed, of what, and what can be rescaled: producer, consumers, factors.
CASES = {
    "linear after linear": (lambda m, x: m.b(m.a(x)), pair(), [("a", "b", 8)]),
    "relu": (lambda m, x: m.b(m.a(x).relu()), pair(), [("a", "b", 8)]),
    "in place": (lambda m, x: m.b(m.a(x).relu_().mul_(x[..., :1])), pair(), [("a", "b", 8)]),
    "gelu": (lambda m, x: m.b(F.gelu(m.a(x))), pair(), []),
    "clamp that no value meets": (lambda m, x: m.b(m.a(x).clamp(-1e6, 1e6)), pair(), []),
    "rounded": (lambda m, x: m.b(torch.div(m.a(x), 0.1, rounding_mode="floor")), pair(), []),
    "read by Python": (
        lambda m, x: m.b(m.a(x)) * (2 if m.a(x)[0, 0, 0].item() > 1e9 else 1),
        pair(),
        [("a", "b", 7)],
    ),
    "no rows": (lambda m, x: m.b(m.a(x)) + m.b(m.a(x)[:0]).sum(), pair(), [("a", "b", 8)]),
    "gate": (
        lambda m, x: m.b(m.a(x) * F.silu(m.c(x))),
        pair(c=linear(6, 8)),
        [("a", "b", 8)],
    ),
    "read twice": (lambda m, x: m.b(m.a(x)) + m.a(x).sum(-1, keepdim=True), pair(), []),
    "returned": (lambda m, x: (m.b(m.a(x)), m.a(x)), pair(), []),
    "two readers": (
        lambda m, x: m.b(m.a(x)) + m.c(m.a(x)),
        pair(c=linear(8, 6)),
        [("a", "b c", 8)],
    ),
    "two producers": (lambda m, x: m.b(m.a(x) + m.c(x)), pair(c=linear(6, 8)), []),
    "consumer used twice": (lambda m, x: m.b(m.a(x)) + m.b(m.c(x)), pair(c=linear(6, 8)), []),
    "shared bias": (
        lambda m, x: m.b(F.linear(m.a(x), m.w, m.bias)) + m.bias[:6],
        pair(a=linear(6, 6), w=weight(8, 6), bias=weight(8)),
        [("a", "", 6)],
    ),
    "parts of packed rows": (
        lambda m, x: m.b(torch.cat([m.a(x)[..., 5:], m.a(x)[..., :2].tanh()], -1)),
        {"a": linear(6, 8), "b": linear(5, 6)},
        [("a", "b", 3)],
    ),
    "written into slices": (
        into_slices,
        {"a": linear(6, 5), "c": linear(6, 3), "b": linear(8, 6)},
        [("a", "b", 5), ("c", "b", 3)],
    ),
    "transposed weight": (
        lambda m, x: torch.matmul(m.a(x), m.w),
        {"a": linear(6, 8), "w": weight(8, 6)},
        [("a", "", 8)],
    ),
    "norm": (lambda m, x: m.a(m.n(x)), {"n": nn.LayerNorm(6), "a": linear(6, 8)}, [("n", "a", 6)]),
    "norm in steps": (
        lambda m, x: m.a(normed(x) * m.gain + m.shift),
        {"gain": weight(6), "shift": weight(6), "a": linear(6, 8)},
        [("", "a", 6)],
    ),
    "norm of the residual": (
        lambda m, x: x + m.a(m.n(x)) + m.n(x),
        {"n": nn.LayerNorm(6), "a": linear(6, 6)},
        [],
    ),
    "grouped heads": (grouped_heads, _ATTENTION, [("v", "o", 4)]),
    "interleaved heads": (
        interleaved_heads,
        {"qkv": linear(6, 24), "o": linear(8, 6)},
        [("qkv", "o", 8)],
    ),
    "unknown to torch's own operations": (
        lambda m, x: m.b(torch.fft.fft(m.a(x)).real),
        pair(),
        [],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_groups(net, data, case):
    function, members, expected = CASES[case]
    structure = discover(net(function, **members), data)
    found = [(g.producer, " ".join(g.consumers), g.size) for g in structure.groups]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2]])
def test_rescaling_changes_nothing(net, data, case):
    model = net(CASES[case][0], **CASES[case][1])
    before = model(data)
    for group in discover(model, data).groups:
        parameters = {n: p.clone() for n, p in model.named_parameters()}
        group.apply_(model, torch.linspace(0.1, 9, group.size))
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, parameters[n])}
        assert changed == {edit.parameter for edit in group.edits}
    torch.testing.assert_close(model(data), before, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("case", "parameter", "index"),
    [
        ("grouped heads", "o.weight", [0, 1, 0, 1, 2, 3, 2, 3]),
        ("interleaved heads", "qkv.bias", [*[-1] * 8, 0, 1, 2, 3, *[-1] * 8, 4, 5, 6, 7]),
        ("parts of packed rows", "b.weight", [0, 1, 2, -1, -1]),
        ("parts of packed rows", "a.weight", [*[-1] * 5, 0, 1, 2]),
    ],
)
def test_which_row_serves_which_column(net, data, case, parameter, index):
    (group,) = discover(net(CASES[case][0], **CASES[case][1]), data).groups
    (edit,) = [edit for edit in group.edits if edit.parameter == parameter]
    assert edit.index.tolist() == index


def test_a_square_makes_a_square(net, data):
    model = net(lambda m, x: m.b(m.a(x).relu() ** 2), **pair())
    (group,) = discover(model, data).groups
    assert {edit.parameter: edit.power for edit in group.edits} == {
        "a.weight": -1,
        "a.bias": -1,
        "b.weight": 2,
    }


def test_a_constant_is_added_to_the_gain(net, data):
    model = net(lambda m, x: m.a(normed(x) * (1.0 + m.w.float())), w=weight(6), a=linear(6, 8))
    (group,) = discover(model, data).groups
    assert group.edits[0].offset == 1.0
    group.apply_(model, torch.full((6,), 4.0))
    torch.testing.assert_close(model.a.weight.shape, torch.Size([8, 6]))


def test_a_parameter_read_in_two_ways_is_left_alone(net, data):
    function = lambda m, x: m.a(normed(x) * (1 + m.w)) + m.b(normed(x) * m.w)  # noqa: E731
    structure = discover(net(function, w=weight(6), a=linear(6, 8), b=linear(6, 8)), data)
    assert structure.groups == ()
    assert "constant added" in structure.rejected[0].reason


def test_a_branch_that_was_not_taken_may_read_the_output(net, data):
    function = lambda m, x: m.a(m.n(x)) if len(x) < 9 else m.b(m.n(x))  # noqa: E731
    model = net(function, n=nn.LayerNorm(6), a=linear(6, 8), b=linear(6, 8))
    (rejected,) = (r for r in discover(model, data).rejected if r.producer == "n")
    assert "b.weight was not read" in rejected.reason


def test_layers_of_one_input_are_listed(net, data):
    function = lambda m, x: m.a(x) + m.b(x.view(15, 6)).view(3, 5, 8) + m.c(x * 2)  # noqa: E731
    model = net(function, a=linear(6, 8), b=linear(6, 8), c=linear(6, 8))
    assert discover(model, data).shared_inputs == (("a", "b"),)


@pytest.mark.parametrize(
    "inputs",
    [lambda x: x, lambda x: (x,), lambda x: {"x": x}],
    ids=["tensor", "tuple", "mapping"],
)
def test_kinds_of_inputs(net, data, inputs):
    model = net(CASES["relu"][0], **CASES["relu"][1])
    assert len(discover(model, inputs(data)).groups) == 1
    assert len(discover(model, lambda: model(data)).groups) == 1


def test_a_function_that_does_not_run_the_model_is_refused(net):
    model = net(CASES["relu"][0], **CASES["relu"][1])
    with pytest.raises(ValueError, match=r"No parameter of Net was used\. Give"):
        discover(model, lambda: None)


def test_a_packed_model_is_refused(build, quantize, export, batches):
    directory = export(quantize(build(), "int4_wo_32"))
    for bound in (None, 1 << 40):
        model = load_checkpoint(directory, max_memory=bound)
        with pytest.raises(ValueError, match=r"q_proj holds codes\. Load .*dequantize=True"):
            discover(model, batches[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "tied", "opt"])
def test_the_model_is_left_as_it_was(build, unchanged, batches, name, dtype):
    model = build(name, dtype).train()
    with unchanged(model):
        structure = discover(model, batches[0])
    assert model.config.use_cache
    assert len(structure.groups) == {"llama": 9, "tied": 8, "opt": 8}[name]
    assert structure.blocks == tuple(
        f"model.{'decoder.' * (name == 'opt')}layers.{i}" for i in (0, 1)
    )


def test_the_model_is_left_as_it_was_after_an_error(build, unchanged):
    model = build()
    with unchanged(model), pytest.raises(IndexError):
        discover(model, torch.full((1, 4), 64))
