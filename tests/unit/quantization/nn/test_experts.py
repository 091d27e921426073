"""Experts with stacked parameters as linear layers of their own."""

import logging

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.nn.experts import corresponding_experts, split_experts, stack_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts

# Names of the linear layers of an expert, as checkpoints of the architecture have them.
MODELS = {
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, {"w1", "w2", "w3"}),
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
        {"gate_proj", "up_proj", "down_proj"},
    ),
    "deepseek_v3": (
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        {"gate_proj", "up_proj", "down_proj"},
    ),
    "gpt_oss": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        {"gate_up_proj", "down_proj"},  # stored stacked, transposed, with biases
    ),
    "nemotron_h": (
        {
            "num_hidden_layers": None,
            "layers_block_type": ["moe", "attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        {"up_proj", "down_proj"},  # no gate
    ),
}


@pytest.fixture
def moe(build):
    def moe(name="mixtral", **changes):
        model = build(name, **{**MODELS[name][0], **changes})
        for key, value in model.named_parameters():
            if "gate." in key or "router" in key or "experts" in key:
                nn.init.normal_(value.detach(), std=0.3)
        return model

    return moe


def experts_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, LinearExperts)}


@pytest.mark.parametrize("name", MODELS)
class TestUnfuse:
    def test_function_is_kept(self, moe, logits, name):
        model = moe(name)
        before = logits(model)
        assert split_experts(model)
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)

    def test_linear_layers_have_the_saved_names(self, moe, name):
        model = moe(name)
        split_experts(model)
        for module in experts_of(model).values():
            expert = module.get_submodule("3")
            assert {n for n, m in expert.named_children() if type(m) is nn.Linear} == MODELS[name][
                1
            ]

    def test_weights_take_no_memory_of_their_own(self, moe, name):
        model = moe(name)
        before = {p.untyped_storage().data_ptr() for p in model.parameters()}
        split_experts(model)
        assert {p.untyped_storage().data_ptr() for p in model.parameters()} == before

    def test_fuse_is_the_way_back(self, moe, unchanged, name):
        model = moe(name)
        with unchanged(model):
            stack_experts(split_experts(model))

    def test_gradients_arrive(self, moe, batches, name):
        model = moe(name)
        split_experts(model)
        model(batches[0]).logits.square().sum().backward()
        for group in corresponding_experts(model):
            assert any(model.get_submodule(n).weight.grad is not None for n in group)


class TestForward:
    def test_tokens_that_no_expert_takes_give_zero(self, moe):
        model = moe()
        module = model.model.layers[0].mlp.experts
        x, weights = torch.randn(3, 64), torch.ones(3, 2)
        index = torch.tensor([[0, 4], [1, 0], [4, 4]])  # 4 is one too many
        split_experts(model)
        y = module(x, index, weights)
        first = module(x[:1], torch.tensor([[0]]), torch.ones(1, 1))
        torch.testing.assert_close(y[:1], first)
        assert not y[2].any() and y[1].any()

    def test_no_tokens(self, moe):
        model = moe()
        split_experts(model)
        module = model.model.layers[0].mlp.experts
        empty = torch.zeros(0, 2)
        assert module(torch.zeros(0, 64), empty.long(), empty).shape == (0, 64)


class TestQuantize:
    def test_a_failure_leaves_the_stacks(self, moe, config_of, unchanged):
        model = moe()
        with unchanged(model), pytest.raises(ValueError, match="dataloader"):
            ModelQuantizer(config_of("int8")).quantize_model(model)
        model.lm_head.weight.data[0, 0] = torch.nan
        with unchanged(model), pytest.raises(ValueError, match="NaN"):
            ModelQuantizer(config_of("int8_wo", ())).quantize_model(model)

    def test_excluded_experts_stay_stacked(self, moe, quantize, config_of, logits):
        model = quantize(moe(), config_of("int8_wo", ["lm_head", "*.0.mlp.experts*"]))
        assert list(experts_of(model)) == ["model.layers.1.mlp.experts"]
        assert model.model.layers[0].mlp.experts.gate_up_proj.dim() == 3

    def test_each_expert_sees_its_own_tokens(self, moe, config_of, batches):
        """Input ranges against the tokens that the router sends to each expert."""
        model = moe()
        seen = {}

        def watch(module, args):
            x, index, _ = args
            for e in range(4):
                routed = x[(index == e).any(-1)]
                if len(routed):
                    seen[e] = max(seen.get(e, 0.0), routed.abs().max().item())

        handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(watch)
        with torch.no_grad():
            for batch in batches:
                model(batch)
        handle.remove()
        ModelQuantizer(config_of("fp8")).quantize_model(model, batches)
        layer = model.model.layers[0].mlp.experts
        assert len(set(seen.values())) > 1
        for e, amax in seen.items():
            for part in ("w1", "w3"):
                scale = layer.get_submodule(f"{e}.{part}").input_quantizer.scale
                assert scale.item() == pytest.approx(amax / 448, rel=1e-5)

    def test_experts_share_an_input_scale_on_demand(self, moe, config_of, batches):
        config = config_of("fp8", sync_moe_expert_input_amax=True)
        model = ModelQuantizer(config).quantize_model(moe(), batches)
        apart = ModelQuantizer(config_of("fp8")).quantize_model(moe(), batches)
        for group in corresponding_experts(model):
            shared = {model.get_submodule(n).input_quantizer.scale.item() for n in group}
            own = {apart.get_submodule(n).input_quantizer.scale.item() for n in group}
            assert shared == {max(own)} and len(own) > 1

    @pytest.mark.parametrize(("name", "scale"), [("fp8", "scale"), ("nvfp4", "scale_2")])
    def test_an_expert_without_tokens_takes_the_widest_range(
        self, moe, config_of, batches, caplog, logits, name, scale
    ):
        model = moe(num_experts_per_tok=1)
        gate = model.model.layers[0].mlp.gate.weight.data
        gate[0], gate[1], gate[2:] = 1.0, -1.0, 0.0  # the first two experts take all
        quark = logging.getLogger("quark")
        quark.addHandler(caplog.handler)
        try:
            ModelQuantizer(config_of(name)).quantize_model(model, batches)
        finally:
            quark.removeHandler(caplog.handler)
        layer = model.model.layers[0].mlp.experts
        for part in ("w1", "w2", "w3"):
            inputs = [layer.get_submodule(f"{e}.{part}").input_quantizer for e in range(4)]
            scales = [getattr(quantizer, scale) for quantizer in inputs]
            assert scales[2] == scales[3] == max(scales[0], scales[1])
        assert "of experts" in caplog.text
        assert logits(model).isfinite().all()

    def test_a_layer_without_tokens_is_an_error(self, moe, config_of, unchanged):
        model = moe()
        model.model.layers[1].mlp.forward = lambda x: x
        with unchanged(model), pytest.raises(ValueError, match="No data reached"):
            ModelQuantizer(config_of("fp8")).quantize_model(model, [torch.zeros(1, 4).long()])

    @pytest.mark.parametrize("name", MODELS)
    def test_every_expert_is_frozen(self, moe, quantize, logits, name):
        model = quantize(moe(name), "int8")
        quantized = [
            n for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer) and m.frozen
        ]
        expected = {n for group in corresponding_experts(model) for n in group}
        assert expected and expected <= set(quantized)
        assert logits(model).isfinite().all()


class TestStacked:
    def test_assigned_stacks_reach_the_linear_layers(self, moe, logits):
        source, model = moe(), moe()
        stacks = {n: p.detach().clone() for n, p in source.named_parameters() if "experts" in n}
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.data.zero_()
        split_experts(model)
        for module in experts_of(model).values():
            module.expect_stacked()
        assert stacks.keys() <= model.state_dict().keys()
        for name, tensor in stacks.items():
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, nn.Parameter(tensor))
        assert not stacks.keys() & model.state_dict().keys()
        torch.testing.assert_close(logits(model), logits(source), rtol=1e-5, atol=1e-5)

    def test_mixed_formats_cannot_be_stacked(self, moe):
        model = moe()
        split_experts(model)
        module = model.model.layers[0].mlp.experts
        module.get_submodule("1.w3").to(torch.float16)
        with pytest.raises(ValueError, match="different formats"):
            module.expect_stacked()
