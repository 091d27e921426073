"""The pipeline as a whole: what quantized models compute, checked against torch's own operators."""

import logging
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from quark.torch.quantization import api
from quark.torch.quantization.config.algo import AlgoConfig, GPTQConfig
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.presets import scheme

INT8 = Int8PerTensorSpec().to_quantization_spec()


def int8(x):
    """Symmetric int8 per tensor."""
    return torch.fake_quantize_per_tensor_affine(x, x.abs().max().item() / 127.5, 0, -128, 127)


def int8_rows(x):
    """Symmetric int8 per row."""
    scale, zeros = x.abs().amax(1) / 127.5, torch.zeros(len(x), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, zeros, 0, -128, 127)


class TestFrozenWeights:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))

    def frozen(self, spec):
        model = nn.Sequential(nn.Linear(64, 24))
        model[0].weight = nn.Parameter(self.weight.clone())
        ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(model)
        assert torch.equal(model[0].weight, self.weight)  # only freezing changes it
        return ModelQuantizer.freeze(model)[0].weight.detach()

    def test_int8_per_tensor(self):
        assert torch.equal(self.frozen(INT8), int8(self.weight))

    def test_int8_per_channel(self):
        spec = Int8PerChannelSpec(ch_axis=0, symmetric=True).to_quantization_spec()
        assert torch.equal(self.frozen(spec), int8_rows(self.weight))

    def test_uint4_per_group(self):
        spec = Uint4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec()
        groups = self.weight.view(48, 32)
        scale = (groups.amax(1) - groups.amin(1)) / 15
        zeros = (-groups.amin(1) / scale).round().int()
        expected = torch.fake_quantize_per_channel_affine(groups, scale, zeros, 0, 0, 15)
        assert torch.equal(self.frozen(spec), expected.view(24, 64))

    def test_fp8_per_tensor(self):
        spec = FP8E4M3PerTensorSpec().to_quantization_spec()
        scale = self.weight.abs().max() / 448
        expected = (self.weight / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(self.frozen(spec), expected, rtol=1e-6, atol=0)

    def test_bfloat16(self):
        expected = self.weight.bfloat16().float()
        assert torch.equal(self.frozen(scheme("bfloat16").weight), expected)


class TestForward:
    def test_all_tensors_of_a_layer(self):
        layer = QuantizationConfig(input_tensors=INT8, output_tensors=INT8, weight=INT8, bias=INT8)
        linear, x = nn.Linear(16, 8), torch.randn(4, 16)
        weight, bias = linear.weight.detach().clone(), linear.bias.detach().clone()
        model = ModelQuantizer(Config(layer)).quantize_model(nn.Sequential(linear), [x])

        product = F.linear(int8(x), int8(weight), int8(bias))
        step = F.linear(x, weight, bias).abs().max().item() / 127.5
        expected = torch.fake_quantize_per_tensor_affine(product, step, 0, -128, 127)
        for stage in (model, ModelQuantizer.freeze(model)):
            off = (stage(x) - expected).abs() / step
            assert off.max() < 1.01  # a product next to a tie may fall to the other side
            assert (off < 1e-3).float().mean() > 0.9

    def test_dynamic_scales_are_those_of_each_token(self):
        model = nn.Sequential(nn.Linear(16, 8, bias=False))
        weight = model[0].weight.detach().clone()
        layer = scheme("w_int8_a_int8_per_token_dynamic")
        layer.weight = None
        ModelQuantizer(Config(layer)).quantize_model(model)
        x = torch.randn(2, 5, 16) * torch.logspace(-2, 2, 10).view(2, 5, 1)
        expected = F.linear(int8_rows(x.view(10, 16)).view(2, 5, 16), weight)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x[1:, 2:3]), expected[1:, 2:3])

    def test_an_empty_batch_passes(self):
        model = ModelQuantizer(Config(scheme("int8"))).quantize_model(
            nn.Sequential(nn.Linear(16, 8)), [torch.randn(2, 16)]
        )
        assert model(torch.empty(0, 16)).shape == (0, 8)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_types_are_kept(self, build, quantize, logits, dtype):
        model = quantize(build("opt", dtype=dtype), "int8")
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert logits(model).dtype == dtype

    def test_freezing_changes_nothing_that_is_computed(self, build, batches, config_of, logits):
        model = ModelQuantizer(config_of("int8")).quantize_model(build("opt"), batches)
        before = logits(model)
        assert torch.equal(logits(ModelQuantizer.freeze(model)), before)
        assert torch.equal(logits(ModelQuantizer.freeze(model)), before)

    def test_gradients_pass_until_the_model_is_frozen(self):
        model = nn.Sequential(nn.Linear(16, 8))
        ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(model)
        x = torch.randn(4, 16)
        model(x).sum().backward()
        torch.testing.assert_close(model[0].weight.grad, x.sum(0).expand(8, 16))


class TestTiedWeights:
    def test_an_embedding_keeps_its_values(self, build, quantize, config_of):
        model = build("tied")
        embedding = model.model.embed_tokens.weight
        before = embedding.detach().clone()
        assert model.lm_head.weight is embedding
        quantize(model, config_of("int8_wo", exclude=[]))
        assert model.model.embed_tokens.weight is embedding
        assert torch.equal(embedding, before)
        assert model.lm_head.weight is not embedding
        assert not torch.equal(model.lm_head.weight, before)

    def test_weights_stay_tied_where_neither_is_quantized(self, build, quantize):
        model = quantize(build("tied"), "int8_wo")
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_one_weight_in_two_layers(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        weight = model[0].weight.detach().clone()
        ModelQuantizer.freeze(ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(model))
        for layer in model:
            assert torch.equal(layer.weight, int8_rows(weight))


class TestCalls:
    def test_the_model_is_changed_in_place_and_remembers(self, build, batches, config_of):
        model, config = build(), config_of("int8")
        assert ModelQuantizer(config).quantize_model(model, batches) is model
        assert model.quant_config is config
        assert ModelQuantizer.freeze(model) is model

    def test_not_a_configuration(self):
        advice = r"got a QuantizationConfig: give Config\(global_quant_config=config\)"
        with pytest.raises(TypeError, match=advice):
            ModelQuantizer(QuantizationConfig(weight=INT8))

    def test_freezing_a_float_model(self):
        with pytest.raises(ValueError, match=r"Nothing to freeze: call .*quantize_model first"):
            ModelQuantizer.freeze(nn.Sequential(nn.Linear(8, 8)))

    def test_twice(self, build, config_of, unchanged):
        model = ModelQuantizer(config_of("int8_wo")).quantize_model(build())
        with unchanged(model), pytest.raises(ValueError, match="q_proj is quantized already"):
            ModelQuantizer(config_of("fp8_wo")).quantize_model(model)

    def test_an_algorithm_that_is_not_there(self, build, config_of, unchanged):
        @dataclass
        class Alchemy(AlgoConfig):
            name: str = "alchemy"

        model, config = build(), config_of("int8_wo", algo_config=[Alchemy()])
        with (
            unchanged(model),
            pytest.raises(
                ValueError,
                match=r"Algorithm 'alchemy' is not available in this version \(available: ",
            ),
        ):
            ModelQuantizer(config).quantize_model(model)

    def test_an_error_after_calibration(self, build, batches, config_of, unchanged, monkeypatch):
        def fail(*args):
            raise RuntimeError("late")

        monkeypatch.setattr(api, "mark_as_quantized", fail)
        model = build()
        with unchanged(model), pytest.raises(RuntimeError, match="late"):
            ModelQuantizer(config_of("int8")).quantize_model(model, batches)

    def test_the_log_of_an_application_is_left_alone(self, config_of):
        model = nn.Sequential(nn.Linear(8, 8))
        handlers = list(logging.getLogger().handlers), list(logging.getLogger("quark").handlers)
        ModelQuantizer(Config(scheme("int8_wo"))).quantize_model(model)
        after = logging.getLogger().handlers, logging.getLogger("quark").handlers
        assert handlers[0] and after == handlers  # pytest has set one up


def test_blocks_of_a_model_larger_than_memory_are_read_as_often_as_needed(
    build, batches, config_of, tmp_path
):
    build().save_pretrained(tmp_path)
    model = stream_model(tmp_path)
    cache, reads, back = residency_of(model), Counter(), Counter()
    cache.limit = 0
    read, read_back = cache.source.read, cache.scratch.read
    cache.source.read = lambda names: (reads.update(names), read(names))[1]
    cache.scratch.read = lambda names: (back.update(values := read_back(names)), values)[1]
    config = config_of("int4_wo_32", algo_config=[GPTQConfig()])
    ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
    # To trace the model, to divide it into stacks, and for the data.
    assert {reads[n] for n in reads if ".layers." in n} == {3}
    assert not back  # rounded blocks are read when they are written
