"""Inputs of layers in both streams, and layers that share an input."""

import pytest
import torch

from quark.torch.algorithm.layer_inputs import (
    collect_input_statistics,
    quantize_inputs,
    split_by_input,
)
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of


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
        floats = {f"{n}.weight": layer.weight.detach().clone() for n, layer in here.items()}
        if block.name == names[0]:
            for index in range(len(block)):
                block.run_reference(index)
            for layer in here.values():
                layer.weight.data.mul_(0.8)
            continue
        here[layers[0]].weight.data.mul_(0.5)  # as if solved for
        x = seen_by(model, layers, batches)
        grams, compared = collect_input_statistics(context, block, here, floats, to_the_end=True)
    assert compared.keys() == r.keys()
    for name, folds in compared.items():
        cross = sum(fold.cross for fold in folds)
        expected = (r[name] - x[name]).T @ x[name]
        scale = float(expected.abs().max()) + 1e-3
        torch.testing.assert_close(cross, expected, rtol=1e-3, atol=1e-4 * scale)
        torch.testing.assert_close(grams[name].total, x[name].T @ x[name], rtol=1e-3, atol=1e-2)


def first_block(scheme, batches):
    """The first block of a Llama, and the sums over its inputs beside those of the float model."""
    context = context_of(build(small_config("llama"), torch.float32), scheme, batches=batches)
    name = context.structure.blocks[0]
    layers = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    floats = {f"{n}.weight": layer.weight.detach().clone() for n, layer in layers.items()}
    blocks = run_blocks(context.model, [name], batches, "", compare=True)
    with quantize_inputs(context, name):
        return collect_input_statistics(context, next(blocks), layers, floats, to_the_end=True)


def test_rounding_of_an_input_by_its_own_layer_is_not_compared():
    """In the first block only what rounded inputs did to later layers differs."""
    grams, compared = first_block("mxfp4", [tokens(40), tokens(60)])
    name = next(n for n in compared if n.endswith("q_proj"))
    later = next(n for n in compared if n.endswith("down_proj"))
    assert all(not fold.cross.any() for fold in compared[name])
    assert all(fold.cross.any() for fold in compared[later])
    square = sum(fold.square for fold in compared[name])
    assert not torch.allclose(grams[name].total, square, rtol=1e-4)  # of the rounded inputs


def test_what_rounding_adds_to_inputs():
    """The sum over all tokens of what the format does to them; nothing where inputs stay."""
    batches = [tokens(40), tokens(60)]
    grams, _ = first_block("mxfp4", batches)
    name = next(n for n in grams if n.endswith("q_proj"))
    model = build(small_config("llama"), torch.float32)
    x = seen_by(model, [name], batches)[name]
    spec = scheme("mxfp4").input_tensors
    expected = (TensorQuantizer(spec).fake_quantize_copy(x) - x).sum(0)
    torch.testing.assert_close(grams[name].noise, expected, rtol=1e-3, atol=1e-4)
    assert all(gram.noise is None for gram in first_block("int4_wo_32", batches)[0].values())


@pytest.mark.parametrize("shapes", [[40], [40, 60], [40, 60, 20, 30]])
def test_folds_divide_the_data(shapes):
    grams, compared = first_block("int4_wo_32", [tokens(n) for n in shapes])
    for name, folds in compared.items():
        assert len(folds) == 2
        square = folds[0].square + folds[1].square
        torch.testing.assert_close(square, grams[name].total, rtol=1e-4, atol=1e-3)
        ratio = float(folds[0].square.trace() / square.trace())
        assert 0.15 < ratio < 0.85


def test_experts_are_not_compared():
    batches = [tokens(40)]
    context = context_of(build(small_config("mixtral"), torch.float32), "int4_wo_32")
    name = context.structure.blocks[0]
    layers = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    floats = {f"{n}.weight": layer.weight.detach().clone() for n, layer in layers.items()}
    blocks = run_blocks(context.model, [name], batches, "", compare=True)
    _, compared = collect_input_statistics(context, next(blocks), layers, floats)
    assert {n.split(".")[-1] for n in compared} >= {"q_proj", "o_proj"}
    assert not any("experts" in n for n in compared)


def test_layers_by_turns():
    context = context_of(build(small_config("llama"), torch.float32), "int4_wo_32")
    name = context.structure.blocks[0]
    layers = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    turns = [{n.split(".")[-1] for n in turn} for turn in split_by_input(context, layers)]
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
    turns = split_by_input(context, layers)
    assert len(turns) == 2 and sum(map(len, turns)) == len(layers) == 12


@pytest.mark.parametrize("count", [1, 4])
def test_one_fold_is_summed_apart(count):
    """Leaves by turns; of a single one, the second half of the tokens."""
    batches = [tokens(40) for _ in range(count)]
    model = build(small_config("llama"), torch.float32)
    context = context_of(model, "int4_wo_32", batches=batches)
    name = context.structure.blocks[0]
    here = {n: layer for n, layer in context.layers.items() if n.startswith(f"{name}.")}
    for block in run_blocks(model, [name], batches, ""):
        plain, _ = collect_input_statistics(context, block, here)
        grams, _ = collect_input_statistics(context, block, here, hold_out=True)
        folds = [block.fold(index) for index in range(len(block))]
    seen = seen_by(model, list(here), batches)
    for n, gram in grams.items():
        parts = (
            seen[n].tensor_split(2)
            if folds == [None]
            else seen[n].split(len(seen[n]) // len(folds))
        )
        chosen = (
            parts[1:] if folds == [None] else [p for p, f in zip(parts, folds, strict=True) if f]
        )
        held = sum(x.T @ x for x in chosen)
        torch.testing.assert_close(gram.held_out, held, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gram.total, plain[n].total, rtol=1e-4, atol=1e-4)
        assert gram.tokens == plain[n].tokens and plain[n].held_out is None
