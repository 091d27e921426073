"""The arguments that blocks receive, recorded batch by batch."""

import pytest
import torch
from torch import nn

from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.capture import capture, replace_forwards
from quark.torch.pipeline.stacks import Stack, find_stacks


class Block(nn.Module):
    """Adds what it is given."""

    def __init__(self, returns_tuple):
        super().__init__()
        self.returns_tuple = returns_tuple
        self.layer = nn.Linear(4, 4)

    def forward(self, x, mask, shift=None, flag=True):
        out = self.layer(x) * mask + (0 if shift is None else shift[0])
        return (out, mask) if self.returns_tuple else out


class Model(nn.Module):
    """Two blocks behind a layer; the second receives what ``shift`` computes of its inputs."""

    def __init__(self, returns_tuple=False, times=1, shift=torch.mean):
        super().__init__()
        self.blocks = nn.ModuleList(Block(returns_tuple) for _ in range(2))
        self.first, self.times, self.shift = nn.Linear(4, 4), times, shift

    def forward(self, x):
        x, mask = self.first(x), torch.ones(1, 1)
        for index, block in enumerate(self.blocks):
            for _ in range(self.times):
                out = block(x, mask, shift=(self.shift(x),) if index else None)
                x = out[0] if isinstance(out, tuple) else out
        return x


NAMES = ["blocks.0", "blocks.1"]


def captured(model, batches, part=None):
    inputs, others = ActivationStore(), ActivationStore()
    return capture(model, part or Stack(NAMES), batches, inputs, others), inputs, others


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_what_blocks_receive(returns_tuple):
    model = Model(returns_tuple)
    batches = [torch.randn(n, 4) for n in (2, 3)]
    arguments, inputs, others = captured(model, batches)
    assert len(arguments) == len(inputs) == 2
    for index, batch in enumerate(batches):
        hidden = model.first(batch)
        assert inputs[index].equal(hidden)
        args, kwargs = arguments.get(index, "blocks.0")
        assert [a.tolist() for a in args] == [[[1.0]]]
        assert kwargs == {"shift": None}
        _, kwargs = arguments.get(index, "blocks.1")
        assert kwargs["shift"][0].equal(hidden.mean())  # blocks returned what they received
    assert len(others) == 3  # one mask for all blocks and batches, two shifts
    form = arguments.wrap("blocks.0", torch.zeros(1))
    assert isinstance(form, tuple) is returns_tuple


@pytest.mark.parametrize("returns_tuple", [False, True])
def test_real_blocks_run_only_to_learn_other_outputs(returns_tuple):
    model = Model(returns_tuple, shift=lambda x: torch.ones(()))
    batches = [torch.randn(n, 4) for n in (2, 3)]
    expected, _, _ = captured(model, batches)
    [part] = find_stacks(model, NAMES, batches)
    calls = []
    model.blocks[1].layer.register_forward_hook(lambda *_: calls.append(None))
    arguments, _, _ = captured(model, batches, part)
    assert len(calls) == returns_tuple
    assert [*arguments.forms] == [*expected.forms] == NAMES
    x = torch.randn(3, 4)
    forms = [a.wrap("blocks.0", x) for a in (arguments, expected)]
    assert all(torch.equal(*pair) for pair in zip(*forms, strict=True))


def test_the_model_is_whole_afterwards():
    model, x = Model(), torch.randn(2, 4)
    before = model(x)
    captured(model, [x])
    assert model(x).equal(before)
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_block_that_runs_twice():
    with pytest.raises(ValueError, match=r"blocks\.0 runs more than once"):
        captured(Model(times=2), [torch.randn(2, 4)])


@pytest.mark.parametrize("runs", [False, True])
def test_what_comes_behind_the_last_block_does_not_run(runs):
    class WithHead(Model):
        def forward(self, x):
            return self.head(super().forward(x))

    model = WithHead()
    model.head = nn.Linear(4, 1000)
    model.head.register_forward_pre_hook(lambda module, args: pytest.fail("the head runs"))
    store = ActivationStore()
    part = Stack(NAMES, shares=runs)
    arguments = capture(model, part, [torch.randn(2, 4)], store, ActivationStore())
    assert arguments.forms.keys() == set(NAMES)


def test_replaced_forwards_come_back_after_an_error():
    model = Model()
    own = model.blocks[1].forward = lambda x: x
    with (
        pytest.raises(KeyError),
        replace_forwards(model, {"first": lambda x: x + 1, "blocks.1": lambda x: x + 2}),
    ):
        assert model.first(torch.zeros(1)).item() == 1
        raise KeyError
    assert "forward" not in vars(model.first)
    assert model.blocks[1].forward is own
