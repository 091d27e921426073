"""Choices of routers before and after a change of a model, against hooks on the routers."""

import pytest
import torch

from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.router_choices import RouterChoices, describe_agreement
from tests.models.architectures import build, small_config, tokens

KINDS = ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "granitemoe", "jamba", "llama4_text"]


def choices_of(model, batches):
    choices = RouterChoices()
    with choices.record(model), torch.no_grad():
        for batch in batches:
            model(batch)
    return choices


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_of_experts_is_found(kind):
    model = build(small_config(kind), torch.float32)
    before = choices_of(model, [tokens()])
    split_experts(model)
    shares = before.agreement(choices_of(model, tokens().split(1)))  # other batches
    assert shares and set(shares.values()) == {1.0}
    assert all(name.endswith(("experts", "moe")) for name in shares)


def test_the_share_of_common_experts():
    model = build(small_config("mixtral"), torch.float32)
    before = choices_of(model, [tokens()])
    router = model.model.layers[1].mlp.gate
    picked = []
    router.register_forward_hook(lambda m, args, y: picked.append(y[-1]))
    choices_of(model, [tokens()])
    with torch.no_grad():
        router.weight.copy_(router.weight.flip(0))  # expert 0 is chosen where 3 was
    shares = before.agreement(choices_of(model, [tokens()]))
    first, second = ([set(row.tolist()) for row in rows] for rows in picked)
    expected = sum(len(a & b) for a, b in zip(first, second, strict=True)) / (2 * len(first))
    assert shares == {"model.layers.0.mlp.experts": 1.0, "model.layers.1.mlp.experts": expected}
    assert 0 < expected < 1
    sentence = describe_agreement(shares)
    assert f"{(1 + expected) / 2:.1%}" in sentence
    assert f"fewest in model.layers.1.mlp.experts: {expected:.1%}" in sentence


def test_models_without_experts_have_no_choices():
    model = build(small_config("llama"), torch.float32)
    choices = choices_of(model, [tokens()])
    assert choices.agreement(choices) == {}
