"""Layers whose weight a model reads without calling them: their inputs stay in float."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, T5Config, WavLMConfig, WavLMModel
from transformers import T5ForConditionalGeneration as T5

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.pipeline.batches import run_batch
from quark.torch.quantization import Config, Int8PerTensorSpec, QuantizationConfig
from quark.torch.quantization.direct_reads import find_direct_reads
from quark.torch.quantization.dry_run import without_products, zero_batch
from quark.torch.quantization.preparation import quantized_layers

INT8 = Int8PerTensorSpec(is_dynamic=False).to_quantization_spec()
BOTH = QuantizationConfig(weight=INT8, input_tensors=INT8)
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One layer of each kind; ``tied`` never runs, and has the weight of one that does."""

    def __init__(self):
        super().__init__()
        self.called, self.read, self.through_forward = (nn.Linear(8, 8) for _ in range(3))
        self.typed, self.tied, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.tied.weight = self.called.weight

    def forward(self, x):
        x = self.called(x).to(self.typed.weight.dtype)
        return self.through_forward.forward(F.linear(x, self.read.weight, self.read.bias))


def mamba():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 8}
    return MambaForCausalLM(MambaConfig(vocab_size=64, **sizes)).eval()


def wavlm():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    return WavLMModel(
        WavLMConfig(intermediate_size=64, vocab_size=8, **sizes, **convolutions, **positions)
    ).eval()


PROJECTIONS = {f"encoder.layers.0.attention.{n}_proj" for n in ("q", "k", "v", "out")}
MODELS = {
    "mamba": (mamba, {f"backbone.layers.{n}.mixer.dt_proj" for n in (0, 1)}),
    "wavlm": (wavlm, PROJECTIONS),
}
DATA = {
    "mamba": [{"input_ids": torch.arange(24).view(2, 12)}],
    "wavlm": [{"input_values": torch.randn(2, 800, generator=torch.Generator().manual_seed(1))}],
}


def linear_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def inputs_of(model):
    """Names of the quantized layers, and of those with quantized inputs."""
    layers = dict(quantized_layers(model))
    return set(layers), {n for n, layer in layers.items() if "input_tensors" in layer.quantizers()}


def test_only_a_read_outside_of_the_layer_counts():
    net = Net()
    found = find_direct_reads(net, [*linear_layers(net), "absent"], lambda: net(X))
    assert found == ["read"]
    assert not any("forward" in vars(module) for module in net.modules())


def test_a_module_of_any_kind_keeps_its_weight_alone(caplog):
    net = Net()
    config = Config(BOTH, exclude=["unused", "tied", "typed"])
    ModelQuantizer(config).quantize_model(net, [X])
    assert inputs_of(net) == ({"called", "read", "through_forward"}, {"called", "through_forward"})
    assert "The inputs of 1 layers, such as read, stay in float" in caplog.text


def test_a_layer_that_nothing_reads_still_needs_data():
    with pytest.raises(ValueError, match="No data reached unused"):
        ModelQuantizer(Config(BOTH, exclude=["tied", "typed"])).quantize_model(Net(), [X])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["fp8", "int8", "ptpc_int8"])
def test_models_of_transformers(name, scheme, caplog):
    """The oracle is the model whose configuration names these layers with weights alone."""
    build, direct = MODELS[name]
    config = LLMTemplate.get(name).get_config(scheme, exclude_layers=[])
    data = None if scheme == "ptpc_int8" else DATA[name]
    model = ModelQuantizer(config).quantize_model(build(), data)
    layers, with_inputs = inputs_of(model)
    assert layers - with_inputs == direct
    assert f"The inputs of {len(direct)} layers, such as " in caplog.text
    caplog.clear()
    weights = QuantizationConfig(weight=config.global_quant_config.weight)
    named = Config(config.global_quant_config, layer_quant_config=dict.fromkeys(direct, weights))
    expected = ModelQuantizer(named).quantize_model(build(), DATA[name])
    assert "The inputs of" not in caplog.text
    outputs = [run_batch(ModelQuantizer.freeze(m), DATA[name][0])[0] for m in (model, expected)]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], run_batch(build(), DATA[name][0])[0])


@pytest.mark.parametrize("name", MODELS)
def test_zeros_find_what_data_finds(name):
    build, direct = MODELS[name]
    with torch.device("meta"):
        outline = build()
    names = linear_layers(outline)
    before, zeros = list(outline.parameters()), zero_batch(outline)
    shape = without_products(outline)
    assert set(find_direct_reads(shape, names, lambda: run_batch(shape, zeros))) == direct
    assert all(p.untyped_storage().nbytes() <= p.itemsize for p in shape.parameters())
    assert all(a is b for a, b in zip(before, outline.parameters(), strict=True))
    model = build()
    assert set(find_direct_reads(model, names, lambda: run_batch(model, DATA[name][0]))) == direct


def test_an_encoder_decoder_runs_on_zeros():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5(T5Config(vocab_size=32, **sizes))
    shape = without_products(model)
    logits = run_batch(shape, zero_batch(model)).logits
    assert logits.shape == (1, 8, 32)
    assert not logits.any()


def test_a_model_of_unknown_inputs_has_no_zeros():
    assert zero_batch(nn.Linear(2, 2)) is None


def test_cached_keys_stay_in_float_too(caplog):
    """Outputs of a layer that is not called never exist; the cache of others is quantized."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.k_proj = nn.Linear(8, 8)

        def forward(self, x, reads):
            return x @ self.k_proj.weight if reads else self.k_proj(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Attention(), Attention()

        def forward(self, x):
            return self.b(self.a(x, False), True)

    cache = {"*k_proj": QuantizationConfig(weight=INT8, output_tensors=INT8)}
    config = Config(QuantizationConfig(weight=INT8), kv_cache_quant_config=cache)
    model = ModelQuantizer(config).quantize_model(Model(), [X])
    layers = dict(quantized_layers(model))
    assert {n: sorted(layer.quantizers()) for n, layer in layers.items()} == {
        "a.k_proj": ["output_tensors", "weight"],
        "b.k_proj": ["weight"],
    }
    assert "The inputs and outputs of 1 layers, such as b.k_proj" in caplog.text


def test_the_model_itself_neither_runs_nor_is_copied_with_its_hooks():
    model, calls = Net(), []
    model.register_forward_pre_hook(lambda *_: calls.append("model"))
    model.read.register_forward_hook(lambda *_: calls.append("layer"))
    without_products(model)(X)
    assert calls == []
    assert model._forward_pre_hooks and model.read._forward_hooks
