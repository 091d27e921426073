"""A proof fails whatever is left out, and leaves the model as it was."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.rescaling.proof import prove_groups
from quark.torch.graph.rescaling.proposal import propose_groups
from quark.torch.graph.structure import Edit, RescalingGroup
from quark.torch.graph.trace import trace

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture
def judged(build, unchanged):
    """Prove groups of a model after a change to one of them, with the reasons for what failed."""

    def judged(kind, producer, change, dtype=torch.float32, **config):
        model = build(kind, dtype, use_cache=False, **config)
        if kind != "opt":
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    nn.init.normal_(parameter.detach(), mean=0.5, std=0.2)
        run = lambda: model(IDS)  # noqa: E731
        seen = trace(model, run)
        groups, _ = propose_groups(seen, Aliases(seen))
        changed = [change(g) if g.producer.endswith(producer) else g for g in groups]
        with unchanged(model):
            proved, rejected = prove_groups(model, run, seen.blocks, changed, {})
        assert len(proved) + len(rejected) == len(groups)
        return rejected

    return judged


def without(ending):
    """Leave out the edits of the parameters with an ending."""

    def change(group):
        kept = tuple(e for e in group.edits if not e.parameter.endswith(ending))
        assert len(kept) == len(group.edits) - 1
        return replace(group, edits=kept)

    return change


def edited(ending, **changes):
    """Change the edits of the parameters with an ending."""

    def change(group):
        edits = [replace(e, **changes) if e.parameter.endswith(ending) else e for e in group.edits]
        return replace(group, edits=tuple(edits))

    return change


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "producer", "change"),
    [
        ("llama", "input_layernorm", without("k_proj.weight")),
        ("llama", "layers.1.mlp.up_proj", without("down_proj.weight")),
        ("llama", "v_proj", without("v_proj.bias")),
        ("llama", "model.norm", without("lm_head.weight")),
        ("llama", "v_proj", edited("o_proj.weight", index=torch.arange(64) % 32)),
        ("opt", "self_attn_layer_norm", without("self_attn_layer_norm.bias")),
        ("opt", "layers.0.fc1", edited("fc2.weight", power=2)),
        ("gemma", "input_layernorm", edited("input_layernorm.weight", offset=0.0)),
        ("gemma", "post_attention_layernorm", edited("gate_proj.weight", power=-1)),
    ],
)
def test_what_is_left_out_is_noticed(judged, kind, producer, change, dtype):
    config = {"attention_bias": True} if kind == "llama" else {}
    rejected = judged(kind, producer, change, dtype, **config)
    assert rejected
    assert all(r.producer.endswith(producer) for r in rejected)
    assert all("changes the output by" in r.reason for r in rejected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "opt", "gemma", "qwen3", "cohere"])
def test_nothing_is_noticed_where_nothing_is_left_out(judged, kind, dtype):
    assert judged(kind, "", lambda group: group, dtype) == []


def test_a_group_that_does_nothing_is_not_proved(net, data):
    model = net(lambda m, x: m.b(m.a(x)) * 0 + x, a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    edits = (
        Edit("a.weight", 0, torch.arange(8), -1),
        Edit("a.bias", 0, torch.arange(8), -1),
        Edit("b.weight", 1, torch.arange(8), 1),
    )
    group = RescalingGroup("linear", "a", ("b",), "", 8, edits)
    proved, (rejected,) = prove_groups(model, lambda: model(data), {}, [group], {})
    assert proved == []
    assert "changes nothing" in rejected.reason


def test_nothing_is_proved_of_outputs_that_are_not_finite(net, data):
    model = net(lambda m, x: m.b(m.a(x)) * torch.inf, a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    seen = trace(model, lambda: model(data))
    groups, _ = propose_groups(seen, Aliases(seen))
    proved, (rejected,) = prove_groups(model, lambda: model(data), {}, groups, {})
    assert proved == []
    assert "not finite" in rejected.reason


def test_what_cannot_run_again_is_not_proved(net, data):
    calls = []

    def once(m, x):
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("once only")
        return m.b(m.a(x))

    model = net(once, a=nn.Linear(6, 8), b=nn.Linear(8, 6))
    seen = trace(model, lambda: model(data))
    groups, _ = propose_groups(seen, Aliases(seen))
    proved, (rejected,) = prove_groups(model, lambda: model(data), {}, groups, {})
    assert proved == []
    assert "RuntimeError: once only" in rejected.reason


@pytest.mark.parametrize(
    "factors",
    [torch.ones(3), torch.tensor([1.0, 0.0]), torch.tensor([1.0, torch.inf]), -torch.ones(2)],
    ids=["number", "zero", "infinite", "negative"],
)
def test_impossible_factors_are_refused(net, factors):
    model = net(lambda m, x: m.a(x), a=nn.Linear(2, 2))
    before = model.a.weight.clone()
    group = RescalingGroup("linear", "a", (), "", 2, (Edit("a.weight", 0, torch.arange(2), -1),))
    with pytest.raises(ValueError, match="takes 2 positive finite factors, got"):
        group.apply_(model, factors)
    assert torch.equal(model.a.weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_edit_is_rounded_once(dtype):
    model = nn.Linear(4, 3).to(dtype)
    before = model.weight.detach().double().clone()
    factors = torch.tensor([0.7, 3.1], dtype=torch.float64)
    Edit("weight", 1, torch.tensor([1, -1, 0, 1]), -2, 1.0).apply_(model, factors)
    by = torch.tensor([3.1, 1.0, 0.7, 3.1], dtype=torch.float64)
    expected = (before + 1) / by**2 - 1
    torch.testing.assert_close(
        model.weight.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-7
    )
