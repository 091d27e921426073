"""Scales of cached heads, chosen by the error of the outputs of attention."""

import copy

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization import calibration
from quark.torch.quantization.cache_scales import FACTORS
from quark.torch.quantization.config.presets import kv_cache_scheme
from tests.models.test_streamed import streamed
from tests.unit.quantization.nn.caches import FP8, R3, config_of

IDS = torch.randint(3, 64, (6, 24), generator=torch.Generator().manual_seed(9))
FOUR_BITS = ["int4_per_head", "fp4_per_head"]
CACHED = ("k_proj", "v_proj")


@pytest.fixture
def cached(build):
    """A model of one layer with two key-value heads, with a cache in a scheme."""

    def cached(name, data=(IDS,), model=None, **rest):
        model = model or build(num_hidden_layers=1)
        config = config_of(kv_cache_scheme(name), **rest)
        return ModelQuantizer(config).quantize_model(model, list(data))

    return cached


@pytest.fixture
def by_values(monkeypatch):
    """Let scales stay those of the least squared error of keys and values."""

    def by_values(make):
        with monkeypatch.context() as patch:
            patch.setattr(calibration, "search_head_scales", lambda *_: None)
            return make()

    return by_values


def quantizers(model):
    attention = model.model.layers[0].self_attn
    return {n: getattr(attention, n).quantizers()["output_tensors"] for n in CACHED}


def scales(model):
    return {name: quantizer.scale.tolist() for name, quantizer in quantizers(model).items()}


@torch.no_grad()
def attended(model, only=None):
    """The input of the output projection, (batch, tokens, key-value heads, channels of queries).

    Keys or values alone are quantized, or neither.
    """
    found = []
    for name, quantizer in quantizers(model).items():
        quantizer.enabled = name == only
    layer = model.model.layers[0].self_attn.o_proj
    hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(IDS)
    hook.remove()
    return found[0].double().unflatten(-1, (model.config.num_key_value_heads, -1))


@pytest.mark.parametrize("rest", [{}, {"algorithms": [R3]}], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_each_head_has_the_scale_under_which_attention_changes_least(name, rest, cached, by_values):
    model, first = cached(name, **rest), scales(by_values(lambda: cached(name, **rest)))
    chosen, expected, moved = scales(model), attended(model), 0
    for only, quantizer in quantizers(model).items():
        errors = []
        for factor in FACTORS:
            quantizer.scale = factor * torch.tensor(first[only])
            errors.append((attended(model, only) - expected).square().sum((0, 1, 3)))
        best = torch.stack(errors).argmin(0)
        found = torch.tensor(FACTORS)[best] * torch.tensor(first[only])
        assert chosen[only] == pytest.approx(found.tolist())
        moved += int((best != FACTORS.index(1)).sum())
    assert moved, "the search has nothing to do on this model"


def test_other_caches_keep_their_scales(cached, by_values, build):
    """More bits, other methods, and keys before rotary embedding, which attention does not see."""
    for change in (lambda: cached("int8_per_head"), lambda: cached("fp8")):
        assert scales(change()) == scales(by_values(change))

    def before():
        config = config_of(kv_cache_scheme("int4_per_head"))
        config.kv_cache_post_rope = False
        return ModelQuantizer(config).quantize_model(build(num_hidden_layers=1), [IDS])

    assert scales(before()) == scales(by_values(before))


def test_padding_does_not_count(cached):
    junk = torch.randint(3, 64, (6, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.cat([torch.ones_like(IDS), torch.zeros_like(junk)], 1)
    padded = {"input_ids": torch.cat([IDS, junk], 1), "attention_mask": mask}
    assert scales(cached("int4_per_head", [padded])) == scales(cached("int4_per_head"))


def test_a_model_in_parts_has_the_same_scales(cached, build, tmp_path):
    build().save_pretrained(tmp_path)
    whole = cached("int4_per_head", model=build())
    parts = cached("int4_per_head", model=streamed(tmp_path))
    assert scales(parts) == scales(whole)


def test_nothing_is_left_behind(cached):
    model = cached("int4_per_head")
    assert model.model.layers[0].self_attn.config.watch is None
    assert all(quantizer.enabled for quantizer in quantizers(model).values())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS).logits, model(IDS).logits)


def test_probabilities_may_be_quantized_too(build):
    """They call softmax once for each output; the search computes more of them."""
    config = config_of(kv_cache_scheme("int4_per_head"), softmax_quant_spec=FP8)
    model = build(num_hidden_layers=1)
    model.set_attn_implementation("eager")
    quantized = ModelQuantizer(config).quantize_model(model, [IDS])
    assert quantized(IDS).logits.isfinite().all()
