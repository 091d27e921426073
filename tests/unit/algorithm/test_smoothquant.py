"""SmoothQuant, against the formula of the paper."""

import pytest
import torch

from quark.torch.algorithm.smoothquant import apply, largest_weights, smoothing_factors
from quark.torch.quantization.config.algo import SmoothQuantConfig
from tests.models.architectures import build, small_config, tokens
from tests.unit.algorithm.contexts import context_of


@pytest.mark.parametrize(
    ("alpha", "floor", "expected"),
    [
        (0.5, 1e-3, [8**0.5, 0.5, 1, 1e-3]),
        (1, 1e-3, [4, 0.5, 1, 1e-3]),
        (0, 1e-3, [2, 0.5, 1, 1]),
        (0.5, 0.75, [8**0.5, 0.75, 1, 0.75]),
    ],
)
def test_factors(alpha, floor, expected):
    inputs, weights = torch.tensor([4.0, 0.5, 0.0, 1e-9]), torch.tensor([0.5, 2.0, 3.0, 1.0])
    found = smoothing_factors(inputs, weights, alpha, floor)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


def test_weights_that_are_zero():
    found = smoothing_factors(torch.tensor([4.0]), torch.zeros(1), 0.5, 1e-3)
    torch.testing.assert_close(found, torch.tensor([2 / 1e-5**0.5]))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_a_share(alpha):
    said = rf"SmoothQuantConfig\.alpha must be (between 0 and 1|finite), got {alpha}"
    with pytest.raises(ValueError, match=said):
        SmoothQuantConfig(alpha=alpha)


def inputs_of(model, names, batches):
    """The inputs of modules, (tokens, channels)."""
    found = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, name=name: found[name].append(args[0].flatten(0, -2))
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_what_becomes_of_a_block(alpha):
    model = build(small_config("llama"), torch.float32)
    batches = [tokens(20), tokens(30)]
    block = model.model.layers[1]
    names = ["q_proj", "k_proj", "v_proj"]
    (x,) = inputs_of(model, ["model.layers.1.self_attn.q_proj"], batches).values()
    weights = [block.self_attn.get_submodule(name).weight.detach().clone() for name in names]
    gain = block.input_layernorm.weight.detach().clone()
    factors = x.abs().amax(0) ** alpha / torch.cat(weights).abs().amax(0) ** (1 - alpha)

    apply(context_of(model, "int8", batches=batches), SmoothQuantConfig(alpha=alpha))
    torch.testing.assert_close(block.input_layernorm.weight.detach(), gain / factors)
    torch.testing.assert_close(block.self_attn.q_proj.weight.detach(), weights[0] * factors)
    torch.testing.assert_close(block.self_attn.k_proj.weight.detach(), weights[1] * factors)
    after = inputs_of(model, ["model.layers.1.self_attn.q_proj"], batches)
    if alpha == 1:  # every channel fills the same range
        (y,) = after.values()
        torch.testing.assert_close(y.abs().amax(0), torch.ones(64))


def test_a_head_that_serves_several_is_smoothed_for_the_largest():
    """Two heads of queries read each head of values."""
    model = build(small_config("llama"), torch.float32)
    name = "model.layers.0.self_attn.o_proj"
    (x,) = inputs_of(model, [name], [tokens()]).values()
    columns = model.get_submodule(name).weight.abs().amax(0)
    before = model.model.layers[0].self_attn.v_proj.weight.detach().clone()

    def shared(channels):  # (kv heads, heads of each, size)
        return channels.view(2, 2, 16).amax(1).flatten()

    # Its input layer norm is smoothed as well, which changes columns of the values alone.
    written = [{"prev_op": "self_attn.v_proj", "layers": ["self_attn.o_proj"]}]
    context = context_of(model, "int8")
    apply(context, SmoothQuantConfig(alpha=0.5, scaling_layers=written))
    factors = (shared(x.abs().amax(0)) / shared(columns)).sqrt()
    after = model.model.layers[0].self_attn.v_proj.weight.detach()
    torch.testing.assert_close(after, before / factors.unsqueeze(1))


def test_a_square_takes_the_root():
    """Between the two layers of this architecture lies a squared ReLU."""
    model = build(small_config("nemotron"), torch.float32)
    name = "model.layers.0.mlp.down_proj"
    before = inputs_of(model, [name], [tokens()])[name].amax(0)
    context = context_of(model, "int8")
    apply(context, SmoothQuantConfig(alpha=1))
    after = inputs_of(model, [name], [tokens()])[name].amax(0)
    torch.testing.assert_close(after, (before > 0).float())


def test_every_weight_that_is_rescaled_counts():
    model = build(small_config("llama"), torch.float32)
    context = context_of(model, exclude=("lm_head", "*k_proj"))
    group = context.structure.groups[0]
    attention = model.model.layers[0].self_attn
    weights = [attention.get_submodule(f"{name}_proj").weight for name in "qkv"]
    expected = torch.cat(weights).abs().amax(0).detach()
    assert torch.equal(largest_weights(group, context), expected)
