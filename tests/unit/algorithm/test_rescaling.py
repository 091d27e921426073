"""Values of channels and of factors, and which rescalings an algorithm may use."""

import logging

import pytest
import torch

from quark.torch.algorithm.layer_inputs import first_readers
from quark.torch.algorithm.layers import (
    check_inputs_quantized,
    check_weights_quantized,
    to_matrix,
)
from quark.torch.algorithm.rescaling import (
    expand_to_channels,
    reduce_to_factors,
    select_groups,
)
from quark.torch.graph.structure import Edit
from quark.torch.numerics.hadamard import hadamard
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig, SmoothQuantConfig
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config
from tests.unit.algorithm.contexts import context_of

INDEX = torch.tensor([1, -1, 0, 1, 2, -1, 1])
VALUES = torch.tensor([4.0, 9.0, 1.0, 2.0, 5.0, 9.0, 6.0])


def edit(power=1, index=INDEX):
    return Edit("weight", 1, index, power)


@pytest.mark.parametrize(
    ("how", "power", "expected"),
    [
        ("amax", 1, [1, 6, 5]),
        ("mean", 1, [1, 4, 5]),
        ("amax", -1, [1, 6, 5]),
        ("amax", 2, [1, 6**0.5, 5**0.5]),
    ],
)
def test_one_value_for_each_factor(how, power, expected):
    found = reduce_to_factors(VALUES, edit(power), 3, how)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("power", [1, -1, 2, -2])
def test_channels_take_their_factor(power):
    factors = torch.tensor([2.0, 3.0, 5.0])
    expected = torch.tensor([3.0, 1, 2, 3, 5, 1, 3]) ** power
    expected[INDEX < 0] = 1
    torch.testing.assert_close(expand_to_channels(factors, edit(power)), expected)


def test_a_permutation_goes_there_and_back():
    index = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    factors = torch.rand(9) + 0.1
    for power in (1, 2):
        channels = expand_to_channels(factors, edit(power, index))
        torch.testing.assert_close(
            reduce_to_factors(channels, edit(power, index), 9, "mean"), factors
        )


def test_what_is_applied_is_what_was_judged():
    """The two ways to rescale a parameter agree: by hand, and in place."""
    weight = torch.nn.Linear(7, 3, bias=False)
    factors, chosen = torch.tensor([2.0, 3.0, 5.0]), edit(2)
    expected = weight.weight.detach() * expand_to_channels(factors, chosen)
    chosen.apply_(weight, factors)
    torch.testing.assert_close(weight.weight.detach(), expected)


@pytest.mark.parametrize(("shape", "axis", "rows"), [((3, 4), 1, (3, 4)), ((4, 3), 0, (3, 4))])
def test_weights_as_rows(shape, axis, rows):
    weight = torch.randn(shape)
    assert torch.equal(to_matrix(weight, axis), weight if axis else weight.T)
    assert to_matrix(torch.randn(3, 2, 4), 2).shape == (6, 4)
    assert to_matrix(weight, axis).shape == rows


@pytest.mark.parametrize(
    ("options", "needed"),
    [(AWQConfig(), "weights"), (GPTQConfig(), "weights"), (SmoothQuantConfig(), "inputs")],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_an_algorithm_needs_is_said(options, needed):
    check = {"weights": check_weights_quantized, "inputs": check_inputs_quantized}[needed]
    check(options, {"a": scheme("bfloat16"), "b": scheme("int8")})
    name = options.name
    with pytest.raises(ValueError, match=f"{name} applies to none of the layers.*needs {needed}"):
        check(options, dict.fromkeys("abc", scheme("bfloat16")))


# ---- which groups -------------------------------------------------------------------------------


@pytest.fixture
def llama():
    return context_of(build(small_config("llama")))


def usable(context, written=None, decoder=None, wanted=lambda layer: True):
    options = AWQConfig(scaling_layers=written or [], model_decoder_layers=decoder or "")
    return [g.producer for g in select_groups(context, options, wanted)]


NAMES = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"]
BLOCK = "model.layers.{}"


def test_all_that_were_proved(llama):
    assert usable(llama) == [f"{BLOCK.format(i)}.{name}" for i in (0, 1) for name in NAMES]


def test_those_that_are_written(llama, caplog):
    written = [
        {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
        {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj"], "module2inspect": "x"},
    ]
    with caplog.at_level(logging.INFO):
        found = usable(llama, written, "model.layers")
    expected = [(0, "mlp.up_proj"), (1, "mlp.up_proj"), (0, NAMES[0]), (1, NAMES[0])]
    assert found == [f"{BLOCK.format(i)}.{name}" for i, name in expected]
    assert "read the same output" in caplog.text and "k_proj" in caplog.text


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"prev_op": "input_layernrom", "layers": ["self_attn.q_proj"]},
            "'input_layernrom' .*no decoder block connects them so.*Rescalable: input_layernorm",
        ),
        ({"prev_op": "input_layernorm", "layers": ["mlp.up_proj"]}, "connects them so"),
        ({"prev_op": "input_layernorm"}, r"layers=\[\], which cannot"),
        ({"layers": ["mlp.up_proj"]}, "connects them so"),
        (
            {"prev_op": "self_attn.o_proj", "layers": ["mlp.up_proj"]},
            "cannot be rescaled: is added to another tensor",
        ),
    ],
    ids=["name", "not connected", "no layers", "no producer", "residual"],
)
def test_what_is_written_and_cannot_be(llama, entry, said):
    with pytest.raises(ValueError, match=f"awq: scaling_layers has prev_op=.*{said}"):
        usable(llama, [entry])


@pytest.mark.parametrize("stranger", ["self_attn.o_proj", "mlp.up_proj", "self_attn", "mlp.act_fn"])
def test_a_layer_that_does_not_read_the_output(llama, stranger):
    entry = {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", stranger]}
    said = (
        rf"from model\.layers\.0\.input_layernorm .*: model\.layers\.0\.{stranger}\. Readers of "
        r"\S+: model\.layers\.0\.self_attn\.k_proj, .*v_proj\. Name only readers"
    )
    with pytest.raises(ValueError, match=said):
        usable(llama, [entry])


def test_entries_of_one_producer_rescale_it_once(llama):
    written = [{"prev_op": NAMES[0], "layers": [f"self_attn.{n}_proj"]} for n in "qkv"]
    assert usable(llama, written) == [f"{BLOCK.format(i)}.{NAMES[0]}" for i in (0, 1)]


def test_blocks_that_are_left_out_are_named(caplog):
    """A cap between the layers of the second block, which no factor passes."""
    model = build(small_config("llama"))
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, y: y.tanh())
    found = usable(context_of(model), [{"prev_op": NAMES[3], "layers": ["mlp.down_proj"]}])
    assert found == [f"{BLOCK.format(0)}.{NAMES[3]}"]
    said = "awq: scaling_layers has prev_op='mlp.up_proj', which is not rescaled in model.layers.1:"
    assert f"{said} goes through tanh in model.layers.1.mlp.up_proj." in caplog.text


def test_all_experts_may_be_named():
    experts = [f"mlp.experts.{i}.{n}_proj" for i in range(4) for n in ("gate", "up")]
    written = [{"prev_op": NAMES[2], "layers": [*experts, "mlp.gate"]}]
    context = context_of(build(small_config("mixtral")))
    assert usable(context, written) == [f"{BLOCK.format(i)}.{NAMES[2]}" for i in (0, 1)]


def test_a_layer_that_is_no_module_warns(llama, caplog):
    entry = {"prev_op": "input_layernorm", "layers": ["self_attn.q_proj", "self_attn.k_porj"]}
    usable(llama, [entry])
    said = "awq: scaling_layers has 'self_attn.k_porj', which matches no module of the model."
    assert f"{said} Nearest: k_proj" in caplog.text


def test_another_list_of_blocks(llama):
    said = r"awq: model_decoder_layers='model\.decoder' names no .*\. Give 'model\.layers'"
    with pytest.raises(ValueError, match=said):
        usable(llama, [{"prev_op": NAMES[3], "layers": ["mlp.down_proj"]}], "model.decoder")


def test_what_is_written_but_not_quantized_is_left_alone():
    """Files list every pair of an architecture; some may be excluded."""
    context = context_of(build(small_config("llama")), exclude=("lm_head", "*down_proj"))
    written = [
        {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"]},
        {"prev_op": "self_attn.v_proj", "layers": ["self_attn.o_proj"]},
    ]
    assert usable(context, written) == [f"{BLOCK.format(i)}.self_attn.v_proj" for i in (0, 1)]
    with pytest.raises(ValueError, match="awq found nothing to rescale"):
        usable(context, written[:1])


def test_nothing_that_gains(llama):
    with pytest.raises(
        ValueError, match=r"awq found nothing to rescale \(lm_head: leaves the model; model"
    ):
        usable(llama, wanted=lambda layer: False)


def test_quantized_outputs_stay_what_they_are():
    context = context_of(build(small_config("llama")), "w_fp8_a_fp8_o_fp8")
    assert {name.split(".")[-1] for name in usable(context)} == {NAMES[0], NAMES[2]}


def test_rotated_inputs_are_not_rescaled(llama):
    for i in (0, 1):
        llama.layers[f"{BLOCK.format(i)}.mlp.down_proj"].rotate_input(hadamard(32))
    assert {name.split(".", 3)[3] for name in usable(llama)} == set(NAMES[:3])


def test_layers_of_one_input_are_looked_at_once(llama):
    q, k, v, o = (f"{BLOCK.format(0)}.self_attn.{name}_proj" for name in "qkvo")
    assert first_readers((q, k, v, o), llama) == {q: q, k: q, v: q, o: o}
    assert first_readers((k, v), llama) == {k: k, v: k}
    llama.layers[q].rotate_input(hadamard(32))
    assert first_readers((q, k, v), llama) == {q: q, k: k, v: k}
