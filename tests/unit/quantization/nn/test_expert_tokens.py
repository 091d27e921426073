"""All tokens through all experts while calibrating; the oracle is the input of their layer."""

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.quantization.config.algo import AutoRoundConfig, GPTQConfig
from quark.torch.quantization.nn.expert_tokens import all_experts_observed, count_tokens
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.nn.linear_experts import LinearExperts
from tests.configurations import preset, quantized
from tests.models.architectures import build, small_config, tokens

KINDS = ["mixtral", "qwen3_moe", "glm4_moe", "gpt_oss"]  # routers of four kinds


def model_of(kind="mixtral"):
    return build(small_config(kind, num_hidden_layers=2), torch.float32)


def layers_of_experts(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LinearExperts)}


def watch(modules):
    """Return the inputs of modules, each a list of tensors, and the handles of the hooks."""
    inputs = {name: [] for name in modules}
    handles = [
        module.register_forward_pre_hook(lambda m, args, name=name: inputs[name].append(args[0]))
        for name, module in modules.items()
    ]
    return inputs, handles


def rows(parts):
    """The rows of some tensors, sorted, to compare them as sets."""
    x = torch.cat([part.flatten(0, -2) for part in parts])
    return x[x[:, 0].argsort()]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_experts_see_all_tokens_and_the_model_computes_the_same(kind):
    model = model_of(kind)
    split_experts(model)
    expected = model(tokens()).logits
    layers = layers_of_experts(model)
    assert layers
    first = {
        f"{name}.{expert}": next(layer.get_submodule(str(expert)).children())
        for name, layer in layers.items()
        for expert in range(layer.num_experts)
    }
    given, _ = watch(layers)
    seen, handles = watch(first)
    with all_experts_observed(model), count_tokens(model, 0):
        result = model(tokens()).logits
    assert torch.equal(result, expected)
    for name in first:
        layer = name.rpartition(".")[0]
        assert torch.equal(rows(seen[name]), rows(given[layer]))
    assert all(layer.tokens == [48] * layer.num_experts for layer in layers.values())
    for handle in handles:
        handle.remove()
    seen, _ = watch(first)
    with count_tokens(model, 0):  # as before, outside of the context
        model(tokens())
    assert sum(len(rows(parts)) for parts in seen.values() if parts) == 48 * 2 * len(layers)


@torch.no_grad()
def test_nothing_runs_that_nothing_observes():
    model = model_of()
    split_experts(model)
    experts = layers_of_experts(model)["model.layers.0.mlp.experts"]
    calls, run = [], experts._expert
    experts._expert = lambda index, x: calls.append(len(x)) or run(index, x)
    with all_experts_observed(model), count_tokens(model, 0):
        model(tokens())
    assert sum(calls) == 2 * 48


@torch.no_grad()
def test_padding_is_not_observed():
    model = model_of()
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, 15:] = 0
    batch = {"input_ids": tokens(), "attention_mask": mask}
    config = preset("fp8", moe_calibrate_all_experts=True)
    model = ModelQuantizer(config).quantize_model(model, [batch])
    assert layers_of_experts(model)["model.layers.0.mlp.experts"].tokens == [39] * 4


@torch.no_grad()
def test_static_ranges_are_those_of_the_input_of_the_layer():
    model, scales = model_of(), {}
    split_experts(model)
    given, _ = watch(layers_of_experts(model))
    model(tokens())
    for every in (True, False):
        config = preset("fp8", moe_calibrate_all_experts=every)
        made = quantized(model_of(), config, [tokens()])
        for name, parts in given.items():
            layers = [made.get_submodule(f"{name}.{expert}.w1") for expert in range(4)]
            scales[every, name] = torch.stack([m.input_quantizer.scale for m in layers])
            if every and ".0." in name:  # the first block has the inputs of the float model
                expected = torch.cat(parts).abs().max() / 448
                torch.testing.assert_close(scales[every, name], expected.expand(4))
        assert not any(experts.observes_all for experts in layers_of_experts(made).values())
    assert bool((scales[True, name] >= scales[False, name]).all())
    assert len(scales[False, name].unique()) > 1


@pytest.mark.parametrize("options", [GPTQConfig(), AutoRoundConfig(iters=2)], ids=["gptq", "auto"])
def test_algorithms_run_on_all_tokens(options, batches):
    models = [
        quantized(
            model_of(), preset("int4_wo_32", options, moe_calibrate_all_experts=every), batches
        )
        for every in (True, False)
    ]
    every, routed = (model.state_dict() for model in models)
    name = "model.layers.0.mlp.experts.2.w1.weight"
    if options.name == "gptq":  # AutoRound learns on routed tokens
        assert not torch.equal(every[name], routed[name])
    assert layers_of_experts(models[0])["model.layers.1.mlp.experts"].tokens == [33] * 4


def test_statistics_of_routed_tokens_are_refused(batches):
    statistics = collect_statistics(model_of(), batches)
    config = preset("int4_wo_32", GPTQConfig(), moe_calibrate_all_experts=True)
    with pytest.raises(ValueError, match="statistics have the tokens that routers sent"):
        ModelQuantizer(config).quantize_model(model_of(), statistics=statistics)


def test_models_without_experts_are_told(batches, caplog):
    config = preset("fp8", moe_calibrate_all_experts=True)
    quantized(build(small_config("llama"), torch.float32), config, batches)
    assert "moe_calibrate_all_experts has no effect: no experts are quantized." in caplog.messages
