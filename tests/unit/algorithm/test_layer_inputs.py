"""Corrected weights, against least squares on the data itself."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm.layer_inputs import in_turn, observe_inputs
from quark.torch.algorithm.qronos import DAMPING, correct_
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import plan, prepare
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of

INPUTS, OUTPUTS, TOKENS = 32, 8, 400


def layer_and_data(kind=nn.Linear):
    """A layer, inputs of the float model, and what became of them."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS) if kind is nn.Linear else Conv1D(OUTPUTS, INPUTS)
    nn.init.normal_(linear.weight.detach(), generator=generator)
    model = nn.Sequential(linear)
    prepare(model, plan(model, Config(scheme("int4_wo_32"))))
    mix = torch.randn(INPUTS, INPUTS, generator=generator) / INPUTS**0.5
    r = torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    x = r + 0.3 * torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    return model[0], r, x


def rows_of(layer):
    return (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).detach().clone()


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_weight_goes_towards_least_squares(kind, share):
    layer, r, x = layer_and_data(kind)
    before, gram = rows_of(layer), Gram()
    gram(x)
    correct_(layer, gram, (r - x).T @ x, share)
    # Damping is a few more tokens, at which the corrected weight shall be what the weight was.
    ridge = (DAMPING * gram.total.diagonal().mean()).sqrt() * torch.eye(INPUTS)
    inputs = torch.cat([x, ridge])
    wanted = torch.cat([r @ before.T, ridge @ before.T])
    best = torch.linalg.lstsq(inputs, wanted).solution.T
    torch.testing.assert_close(
        rows_of(layer), before + share * (best - before), rtol=1e-3, atol=1e-4
    )


def test_inputs_that_stayed_ask_for_nothing():
    layer, r, _ = layer_and_data()
    before, gram = rows_of(layer), Gram()
    gram(r)
    correct_(layer, gram, torch.zeros(INPUTS, INPUTS))
    assert torch.equal(rows_of(layer), before)


def test_inputs_that_are_always_zero():
    layer, _, _ = layer_and_data()
    before, gram = rows_of(layer), Gram()
    gram(torch.zeros(4, INPUTS))
    correct_(layer, gram, torch.zeros(INPUTS, INPUTS))
    assert torch.equal(rows_of(layer), before)


def seen_by(model, names, batches):
    """Inputs of layers when the whole model runs."""
    seen = {name: [] for name in names}
    handles = [
        model.get_submodule(n).register_forward_pre_hook(
            lambda m, args, n=n: seen[n].append(args[0].flatten(0, -2).clone())
        )
        for n in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items() if parts}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "opt"])
def test_inputs_of_both_streams(kind):
    """Weights of the first block change; the second compares what reaches it."""
    batches = [tokens(40), tokens(60), tokens(20)]
    model = build(small_config(kind), torch.float32)
    context = context_of(model, "int4_wo_32", batches=batches)
    names = context.structure.blocks
    inside = [[n for n in context.layers if n.startswith(f"{name}.")] for name in names]
    r = seen_by(model, inside[1], batches)
    for block, layers in zip(
        run_blocks(model, names, batches, "", compare=True), inside, strict=True
    ):
        here = {n: context.layers[n] for n in layers}
        floats = {n: layer.weight.detach().clone() for n, layer in here.items()}
        if block.name == names[0]:
            for index in range(len(block)):
                block.refer(index)
            for layer in here.values():
                layer.weight.data.mul_(0.8)
            continue
        here[layers[0]].weight.data.mul_(0.5)  # as if solved for
        x = seen_by(model, layers, batches)
        grams, crosses = observe_inputs(context, block, here, floats, to_the_end=True)
    assert crosses.keys() == r.keys()
    for name, cross in crosses.items():
        expected = (r[name] - x[name]).T @ x[name]
        scale = float(expected.abs().max()) + 1e-3
        torch.testing.assert_close(cross, expected, rtol=1e-3, atol=1e-4 * scale)
        torch.testing.assert_close(grams[name].total, x[name].T @ x[name], rtol=1e-3, atol=1e-2)


def test_experts_are_not_compared():
    batches = [tokens(40)]
    context = context_of(build(small_config("mixtral"), torch.float32), "int4_wo_32")
    name = context.structure.blocks[0]
    layers = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    floats = {n: layer.weight.detach().clone() for n, layer in layers.items()}
    blocks = run_blocks(context.model, [name], batches, "", compare=True)
    _, crosses = observe_inputs(context, next(blocks), layers, floats)
    assert {n.split(".")[-1] for n in crosses} >= {"q_proj", "o_proj"}
    assert not any("experts" in n for n in crosses)


def test_layers_by_turns():
    context = context_of(build(small_config("llama"), torch.float32), "int4_wo_32")
    name = context.structure.blocks[0]
    layers = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    turns = [{n.split(".")[-1] for n in turn} for turn in in_turn(context, layers)]
    assert turns == [
        {"q_proj", "k_proj", "v_proj"},
        {"o_proj"},
        {"gate_proj", "up_proj"},
        {"down_proj"},
    ]


def test_experts_have_their_turn_together():
    context = context_of(build(small_config("mixtral"), torch.float32), "int4_wo_32")
    name = context.structure.blocks[0]
    layers = {n: m for n, m in context.layers.items() if n.startswith(f"{name}.") and "exp" in n}
    turns = in_turn(context, layers)
    assert len(turns) == 2 and sum(map(len, turns)) == len(layers) == 12
