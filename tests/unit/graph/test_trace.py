"""What is written down of a forward pass."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from quark.torch.graph.trace import VIEW_WRITE, trace, trace_blocks


def ops(function, *given):
    """Names, input and output numbers of what a function does to a square tensor."""

    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    x, model = torch.ones(2, 2), Model()
    seen = trace(model, lambda: model(x))
    return [
        (op.name, [v.number for v in op.inputs], [v.number for v in op.outputs]) for op in seen.ops
    ], seen


def test_operations_are_linked_by_numbers():
    found, seen = ops(lambda x: (x * 2).relu().sum())
    assert found == [("mul", [1], [2]), ("relu", [2], [3]), ("sum", [3], [4])]
    assert seen.results == {4}


def test_a_view_of_the_same_elements_is_the_same_tensor():
    found, _ = ops(lambda x: x.view(2, 2) * x.permute(1, 0))
    assert found == [("permute", [1], [2]), ("mul", [1, 2], [3])]


def test_an_equal_copy_is_another_tensor():
    found, _ = ops(lambda x: x.clone() + x.clone())
    assert found == [("clone", [1], [2]), ("clone", [1], [3]), ("add", [2, 3], [4])]


def test_what_is_written_to_is_another_tensor():
    found, _ = ops(lambda x: (x * 1).mul_(x).neg_())
    assert found == [("mul", [1], [2]), ("mul", [2, 1], [3, 3]), ("neg", [3], [4, 4])]


def test_a_view_keeps_up_with_what_is_written_to_its_origin():
    def function(x):
        y = x * 1
        y[0] = x[1]
        return y * 2

    found, _ = ops(function)
    (into,) = (op for op in found if op[0] == VIEW_WRITE)
    (before,) = (op for op in found if op[0] == "mul" and op[1] == [1])
    assert into[1][0] == before[2][0]
    assert found[-1][1] == into[2]


def test_a_view_that_nobody_reads_again_is_not_mentioned():
    def function(x):
        y = x * 1
        y[0] = x[1]
        return x

    assert VIEW_WRITE not in {name for name, *_ in ops(function)[0]}


def test_results_of_a_language_model(build, batches):
    model = build(use_cache=False)
    seen = trace(model, lambda: model(batches[0]))
    assert list(seen.blocks) == ["model.layers.0", "model.layers.1"]
    assert [len(calls) for calls in seen.blocks.values()] == [1, 1]
    assert set(seen.parameters.values()) == {name for name, _ in model.named_parameters()}
    assert {op.block for op in seen.ops if op.module.endswith("q_proj")} == set(seen.blocks)
    last = seen.ops[-1]
    assert (last.module, last.block) == ("lm_head", "")
    assert last.outputs[0].number in seen.results


def test_a_block_gives_again_what_it_gave(build, batches):
    model = build(use_cache=False)
    seen = trace(model, lambda: model(batches[0]))
    for name, (call,) in seen.blocks.items():
        again = model.get_submodule(name)(*call.args, **call.kwargs)
        assert torch.equal(again, call.output)


def test_the_model_is_left_as_it_was(build, unchanged):
    model = build()
    with unchanged(model), pytest.raises(IndexError):
        trace(model, lambda: model(torch.full((1, 2), 64)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_blocks_alone_are_those_of_a_trace(kind, build, batches):
    model = build(kind)

    def run():
        return model(batches[0])

    expected, blocks = trace(model, run).blocks, trace_blocks(model, run)
    assert list(blocks) == list(expected) != []
    for name, calls in blocks.items():
        assert len(calls) == len(expected[name]) == 1
        assert torch.equal(calls[0].args[0], expected[name][0].args[0])
        assert calls[0].output_numbers[:1] != calls[0].input_numbers[:1]
    for one, other in itertools.pairwise(blocks.values()):
        assert one[0].output_numbers[:1] == other[0].input_numbers[:1]


def test_blocks_alone_hold_no_integers_of_the_pass():
    codes = []

    class Block(nn.Module):
        def forward(self, x):
            unpacked = torch.arange(4)
            codes.append(weakref.ref(unpacked))
            return x * unpacked

    model = nn.Sequential(nn.ModuleList([Block() for _ in range(3)]))
    model.forward = lambda x: [x := block(x) for block in model[0]][-1]
    alive = []

    def run():
        model(torch.ones(2, 4))
        alive.append(sum(code() is not None for code in codes))

    assert list(trace_blocks(model, run)) == ["0.0", "0.1", "0.2"]
    assert alive == [0]
