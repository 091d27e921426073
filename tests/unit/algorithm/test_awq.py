"""AWQ, against outputs computed from the data itself."""

from dataclasses import replace

import pytest
import torch

from quark.torch.algorithm import awq
from quark.torch.algorithm.awq import apply, candidate_factors, check
from quark.torch.algorithm.layers import output_error
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
from quark.torch.quantization.config.presets import scheme
from tests.models.architectures import build, small_config
from tests.unit.algorithm.contexts import context_of
from tests.unit.algorithm.losses import BATCHES, CASES, Judge

X = torch.randn(200, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("inputs", [12, 600])
def test_errors_of_outputs(inputs):
    x = torch.randn(200, inputs, generator=torch.Generator().manual_seed(1))
    change = torch.randn(5, inputs)
    expected = (x @ change.T).square().sum()
    torch.testing.assert_close(output_error(change, x.T @ x), expected, rtol=1e-4, atol=0)


def test_candidates_are_judged_on_a_part_of_the_outputs(monkeypatch):
    """Of 15 candidates, three are compared on all outputs, the others on an eighth."""
    rounded = []
    own = awq.fake_quantized_matrix

    def watched(layer, matrix):
        rounded.append(len(matrix))
        return own(layer, matrix)

    monkeypatch.setattr(awq, "fake_quantized_matrix", watched)
    monkeypatch.setattr(awq, "clip_weight_", lambda *_: None)
    outputs = 1024  # of gate_proj, and of up_proj
    config = small_config("llama", intermediate_size=outputs, num_hidden_layers=1)
    model = build(config, torch.float32)
    context = context_of(model, "int4_wo_32", batches=BATCHES)
    judge = Judge(context, "into the mlp")
    plain = judge.losses(relative=True)
    apply(context, AWQConfig())
    losses = judge.losses(relative=True)
    assert rounded.count(outputs) == 3 * 2
    assert rounded.count(outputs // awq.SAMPLE) >= 10 * 2
    assert all(losses[block] <= plain[block] for block in plain)


def test_strengths():
    magnitude, weight = X.abs().mean(0), torch.rand(12) + 0.1
    found = list(candidate_factors(magnitude, weight))
    assert len(found) == 40
    for step, (plain, divided) in enumerate(zip(found[::2], found[1::2], strict=True)):
        r = step / 20
        for factors, expected in (
            (plain, magnitude**r),
            (divided, magnitude**r / weight ** (1 - r)),
        ):
            torch.testing.assert_close(factors / factors[0], expected / expected[0])
            torch.testing.assert_close(factors.max() * factors.min(), torch.tensor(1.0))


@pytest.mark.parametrize("dead", [0, 5, 11])
def test_a_channel_that_is_always_zero_does_not_count(dead):
    alive = torch.arange(12) != dead
    magnitude, weight = X.abs().mean(0) * alive, torch.rand(12) + 0.1
    others = candidate_factors(magnitude[alive], weight[alive])
    for found, expected in zip(candidate_factors(magnitude, weight), others, strict=True):
        assert found[dead] == 1
        torch.testing.assert_close(found[alive], expected)


def test_no_channel_is_ever_used():
    assert list(candidate_factors(torch.zeros(4), torch.ones(4))) == []


def test_factors_stay_within_bounds():
    for factors in candidate_factors(torch.logspace(-30, 8, 12), torch.ones(12)):
        assert float(factors.min()) >= 0.99e-4 and float(factors.max()) <= 1.01e4


@pytest.mark.parametrize(
    ("name", "serves"),
    [("int4_wo_32", True), ("mxfp4", True), ("fp8", True), ("bfloat16", False)],
)
def test_formats_it_serves(name, serves):
    layers = {"a": scheme("bfloat16"), "b": scheme(name, 32)}
    if serves:
        check(AWQConfig(), layers)
    else:
        with pytest.raises(ValueError, match=r"awq applies to none of the layers.*needs weights"):
            check(AWQConfig(), layers)


@pytest.mark.parametrize(
    ("name", "kind", "readers"),
    [
        *((name, *case) for name in ("int4_wo_32", "mxfp4_weight_only") for case in CASES),
        ("int3_wo_per_channel", "llama", "into the mlp"),
        ("nvfp4_weight_only", "llama", "attention"),
    ],
)
@pytest.mark.sampled(3)
def test_outputs_lose_less_than_by_rounding(name, kind, readers, monkeypatch):
    """With one rescaling of a block, judged by the outputs of the layers it serves."""
    monkeypatch.setattr(awq, "clip_weight_", lambda *_: None)
    context = context_of(build(small_config(kind), torch.float32), name, batches=BATCHES)
    judge = Judge(context, readers)
    plain = judge.losses(relative=True)
    apply(context, AWQConfig())
    found = judge.losses(relative=True)
    assert plain.keys() == found.keys() and len(plain) == 2
    assert all(found[block] <= plain[block] * (1 + 1e-4) for block in plain)
    assert sum(found.values()) < 0.999 * sum(plain.values())


@pytest.mark.parametrize("strength", [1, 24])
def test_outliers_alone_are_rescaled_before_an_algorithm_that_rounds(strength):
    model = build(small_config("llama"), torch.float32)
    norms = []
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[:2] *= strength
            for reader in readers:
                reader.weight.data[:, :2] /= strength
            norms.append(norm.weight)
    context = context_of(model, "int4_wo_32", batches=BATCHES)
    before = [weight.detach().clone() for weight in norms]
    config = replace(context.config, algo_config=[AWQConfig(), GPTQConfig()])
    apply(replace(context, config=config), AWQConfig())
    changed = [not torch.equal(*pair) for pair in zip(norms, before, strict=True)]
    assert changed == [strength > 1] * 4
