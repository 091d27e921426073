"""Ranges from data and weights, against ranges that hooks on the float model see."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.pipeline.batches import run_batch
from quark.torch.quantization.calibration import group_by_parent, merged_scale
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.preparation import quantized_layers

INT8 = Int8PerTensorSpec().to_quantization_spec()
UINT8 = Uint8PerTensorSpec().to_quantization_spec()
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
FP8_DYNAMIC = FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec()
STATIC = Config(QuantizationConfig(weight=INT8, input_tensors=INT8), exclude=["lm_head"])
CACHE = ["*k_proj", "*v_proj"]


def ranges_of(model, data):
    """Smallest and largest input and output of each linear layer of a float model."""
    seen = {}

    def watch(name):
        def hook(module, args, output):
            for kind, x in (("input", args[0]), ("output", output)):
                low, high = seen.get((name, kind), (x.min(), x.max()))
                seen[name, kind] = torch.minimum(low, x.min()), torch.maximum(high, x.max())

        return hook

    hooks = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for batch in data:
            model(batch)
    for hook in hooks:
        hook.remove()
    return seen


def scales(model, tensor):
    layers = dict(quantized_layers(model))
    found = {name: layer.quantizers().get(tensor) for name, layer in layers.items()}
    return {name: q.scale for name, q in found.items() if q is not None and q.scale is not None}


def kv_config(spec, base=None, **rest):
    cache = {p: QuantizationConfig(weight=INT8, output_tensors=spec) for p in CACHE}
    return Config(
        base or QuantizationConfig(weight=INT8),
        layer_quant_config=cache,
        kv_cache_quant_config=cache,
        exclude=["lm_head"],
        **rest,
    )


class TestStaticRanges:
    @pytest.mark.parametrize("spec", [INT8, UINT8, FP8], ids=["int8", "uint8", "fp8"])
    @pytest.mark.parametrize("name", ["llama", "opt"])
    def test_ranges_are_those_of_the_float_model(self, build, batches, name, spec):
        expected = ranges_of(build(name), batches)
        layer = QuantizationConfig(weight=INT8, input_tensors=spec, output_tensors=spec)
        model = ModelQuantizer(Config(layer)).quantize_model(build(name), batches)
        layers = dict(quantized_layers(model))
        assert len(layers) == 2 * (7 if name == "llama" else 6) + 1
        for layer_name, layer in layers.items():
            for kind, q in (("input", layer.input_quantizer), ("output", layer.output_quantizer)):
                low, high = expected[layer_name, kind]
                if spec is UINT8:
                    assert torch.equal(q.scale, (high - low) / 255)
                    assert torch.equal(q.zero_point, (-low / q.scale).round().int())
                else:
                    divisor = 127.5 if spec is INT8 else 448
                    assert torch.equal(q.scale, torch.maximum(-low, high) / divisor)
                assert q.scale.shape == ()

    def test_batches_may_be_cut_in_any_way(self, build, batches):
        whole = ModelQuantizer(STATIC).quantize_model(build(), batches)
        rows = [row[None] for batch in batches for row in batch]
        cut = ModelQuantizer(STATIC).quantize_model(build(), rows[::-1])
        for name, scale in scales(whole, "input_tensors").items():
            torch.testing.assert_close(scales(cut, "input_tensors")[name], scale, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_gets_float32_scales(self, build, batches, dtype):
        model = ModelQuantizer(STATIC).quantize_model(build(dtype=dtype), batches)
        assert {s.dtype for s in scales(model, "input_tensors").values()} == {torch.float32}
        assert {p.dtype for p in model.parameters()} == {dtype}

    def test_data_is_not_asked_for_where_no_range_needs_it(self, build):
        def data():
            raise AssertionError("asked for data")
            yield

        config = Config(QuantizationConfig(weight=INT8, input_tensors=FP8_DYNAMIC))
        ModelQuantizer(config).quantize_model(build(), data())


class Probe(nn.Module):
    """Notes the state it is called in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.calls = []

    def forward(self, x, mask=None, flag=False):
        self.calls.append((tuple(x.shape), mask is not None, flag, self.training))
        assert not torch.is_grad_enabled()
        return self.norm(self.dropout(self.linear(x)))


class TestRunning:
    def test_modes_are_kept_module_by_module(self, unchanged):
        model = Probe().train()
        model.norm.eval()
        mean = model.norm.running_mean.clone()
        ModelQuantizer(STATIC).quantize_model(model, [torch.randn(4, 8)])
        assert model.calls == [((4, 8), False, False, False)]
        assert model.training and model.dropout.training and model.linear.training
        assert not model.norm.training and torch.equal(model.norm.running_mean, mean)

    @pytest.mark.parametrize(
        ("batch", "calls"),
        {
            "tensor": (torch.ones(2, 8), [((2, 8), False, False, True)]),
            "mapping": (
                {"x": torch.ones(2, 8), "mask": torch.ones(2), "flag": 3},
                [((2, 8), True, 3, True)],
            ),
            "positional": (
                [torch.ones(2, 8), torch.ones(2)],
                [((2, 8), True, False, True)],
            ),
            "tuple_with_other_values": (
                (torch.ones(2, 8), None, True),
                [((2, 8), False, True, True)],
            ),
            "list_of_mappings": (
                [{"x": torch.ones(2, 8)}, {"x": torch.ones(3, 8)}],
                [((2, 8), False, False, True), ((3, 8), False, False, True)],
            ),
        }.values(),
        ids=["tensor", "mapping", "positional", "tuple_with_other_values", "list_of_mappings"],
    )
    def test_forms_of_a_batch(self, batch, calls):
        model = Probe()
        with torch.no_grad():
            run_batch(model, batch)
        assert model.calls == calls

    def test_batches_of_a_tokenizer(self, build, batches):
        from transformers import BatchEncoding

        encoded = [BatchEncoding({"input_ids": b, "labels": b}) for b in batches]
        plain = ModelQuantizer(STATIC).quantize_model(build(), batches)
        model = ModelQuantizer(STATIC).quantize_model(build(), encoded)
        assert scales(model, "input_tensors") == scales(plain, "input_tensors")

    def test_something_else_is_refused(self, build, unchanged):
        model = build()
        with unchanged(model), pytest.raises(TypeError, match=r"tensor, a mapping .* got .*str"):
            ModelQuantizer(STATIC).quantize_model(model, ["a sentence"])


class TestBadData:
    def test_no_dataloader(self, build, unchanged):
        model = build()
        with (
            unchanged(model),
            pytest.raises(
                ValueError,
                match=r"Static activation ranges need .* pass a dataloader .* is_dynamic=True",
            ),
        ):
            ModelQuantizer(STATIC).quantize_model(model)

    @pytest.mark.parametrize("data", [[], iter(())], ids=["list", "iterator"])
    def test_empty_dataloader(self, build, unchanged, data):
        model = build()
        with unchanged(model), pytest.raises(ValueError, match=r"dataloader is empty: .* a batch"):
            ModelQuantizer(STATIC).quantize_model(model, data)

    def test_a_layer_that_sees_no_data(self, unchanged):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                return self.used(x)

        model = Branches()
        with (
            unchanged(model),
            pytest.raises(ValueError, match=r"No data reached unused\. .* or exclude them"),
        ):
            ModelQuantizer(STATIC).quantize_model(model, [torch.ones(1, 8)] * 2)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_activations_that_are_not_finite(self, unchanged, value):
        class Overflow(nn.Module):
            def forward(self, x):
                return torch.where(x[:, :1] == 1, x, x * value)

        model = nn.Sequential(Overflow(), nn.Linear(8, 8))
        layer = QuantizationConfig(weight=INT8, input_tensors=INT8)
        config = Config(QuantizationConfig(weight=INT8), layer_quant_config={"1": layer})
        data = [torch.ones(1, 8), torch.full((1, 8), 2.0)]
        with (
            unchanged(model),
            pytest.raises(
                ValueError,
                match=r"The input of 1 was NaN or infinite .* wider type than torch\.float32",
            ),
        ):
            ModelQuantizer(config).quantize_model(model, data)

    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    @pytest.mark.parametrize("scheme", ["int8_wo", "w_uint4_per_group_asym", "fp8_wo", "float16"])
    def test_weights_that_are_not_finite(self, build, config_of, unchanged, scheme, value):
        model = build()
        with torch.no_grad():
            model.model.layers[1].mlp.gate_proj.weight[3, 5] = value
        with (
            unchanged(model),
            pytest.raises(
                ValueError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight has NaN or infinite"
            ),
        ):
            ModelQuantizer(config_of(scheme)).quantize_model(model)

    def test_a_bias_that_is_not_finite(self, build, unchanged):
        model = build("opt")
        with torch.no_grad():
            model.model.decoder.layers[0].fc1.bias[0] = float("nan")
        config = Config(QuantizationConfig(weight=INT8, bias=INT8))
        with unchanged(model), pytest.raises(ValueError, match=r"0\.fc1\.bias has NaN"):
            ModelQuantizer(config).quantize_model(model)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_data_that_breaks_off(self, build, batches, logits, unchanged, error):
        def data():
            yield batches[0]
            raise error("broken off")

        model = build("opt").train()
        model.model.decoder.layers[0].eval()
        with unchanged(model), pytest.raises(error, match="broken off"):
            ModelQuantizer(STATIC).quantize_model(model, data())
        assert torch.equal(logits(model.eval()), logits(build("opt")))


FUSED = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


class TestSharedScales:
    def test_fused_siblings_share_the_widest_range(self, build, batches):
        plain = ModelQuantizer(STATIC).quantize_model(build(), batches)
        config = Config(STATIC.global_quant_config, exclude=["lm_head"])
        config.shared_scale_groups = FUSED
        model = ModelQuantizer(config).quantize_model(build(), batches)
        for tensor in ("weight", "input_tensors"):
            own, shared = scales(plain, tensor), scales(model, tensor)
            for block in ("model.layers.0", "model.layers.1"):
                for parent, group in zip(("self_attn", "mlp"), FUSED, strict=True):
                    names = [f"{block}.{parent}.{name}" for name in group]
                    widest = max(own[name] for name in names)
                    assert all(shared[name] == widest for name in names)
                for name in (f"{block}.self_attn.o_proj", f"{block}.mlp.down_proj"):
                    assert shared[name] == own[name]

    @pytest.mark.parametrize(
        "spec", [UINT8, Int8PerChannelSpec(ch_axis=0, symmetric=True).to_quantization_spec()]
    )
    def test_ranges_that_cannot_be_shared_stay(self, build, spec):
        config = Config(QuantizationConfig(weight=spec))
        plain = ModelQuantizer(config).quantize_model(build())
        shared = Config(QuantizationConfig(weight=spec), shared_scale_groups=FUSED)
        model = ModelQuantizer(shared).quantize_model(build())
        for name, scale in scales(plain, "weight").items():
            assert torch.equal(scales(model, "weight")[name], scale)

    @pytest.mark.parametrize("spec", [INT8, FP8], ids=["int8", "fp8"])
    def test_keys_and_values_of_a_block_share_the_cache_scale(self, build, batches, spec):
        outputs = ranges_of(build(), batches)
        model = ModelQuantizer(kv_config(spec)).quantize_model(build(), batches)
        found = scales(model, "output_tensors")
        divisor = 127.5 if spec is INT8 else 448
        expected = []
        for block in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
            names = [f"{block}.k_proj", f"{block}.v_proj"]
            amax = [max(-low, high) for low, high in (outputs[n, "output"] for n in names)]
            assert amax[0] != amax[1]
            expected.append(max(amax) / divisor)
            assert [found.pop(name) for name in names] == [expected[-1]] * 2
        assert not found and expected[0] != expected[1]

    def test_min_kv_scale(self, build, batches):
        plain = ModelQuantizer(kv_config(FP8)).quantize_model(build(), batches)
        own = sorted({s.item() for s in scales(plain, "output_tensors").values()})
        floor = sum(own) / 2
        model = ModelQuantizer(kv_config(FP8, min_kv_scale=floor)).quantize_model(build(), batches)
        raised = sorted({s.item() for s in scales(model, "output_tensors").values()})
        assert raised == pytest.approx([floor, own[1]]) and own[0] < floor < own[1]

    def test_a_group_of_one(self, build, batches):
        config = kv_config(FP8, kv_cache_group=["*v_proj"])
        outputs = ranges_of(build(), batches)
        found = scales(ModelQuantizer(config).quantize_model(build(), batches), "output_tensors")
        for name, scale in found.items():
            low, high = outputs[name, "output"]
            assert scale == torch.maximum(-low, high) / 448

    def test_a_dynamic_cache_has_nothing_to_share(self, build, batches):
        model = ModelQuantizer(kv_config(FP8_DYNAMIC)).quantize_model(build(), batches)
        assert not scales(model, "output_tensors")


def test_siblings():
    names = ["a.0.k_proj", "a.0.v_proj", "a.1.k_proj", "k_proj", "a.0.xk_proj"]
    assert group_by_parent(names, ["k_proj", "v_proj"]) == [names[:2], [names[2]], [names[3]]]
    assert group_by_parent(names, ["*k_proj"]) == [
        ["a.0.k_proj", "a.0.xk_proj"],
        [names[2]],
        [names[3]],
    ]
    assert group_by_parent(names, []) == []


class TestMergedScale:
    @staticmethod
    def state(scale, spec=INT8):
        return QuantizedTensor(spec, None, torch.tensor(scale), None)

    def test_largest(self):
        assert merged_scale([self.state(1.0), self.state(3.0), self.state(2.0)]) == 3
        assert merged_scale([self.state(2.0)]) == 2

    @pytest.mark.parametrize(
        "others",
        [
            [None],
            [SimpleNamespace(scale=None, scheme=INT8.scheme)],
            [QuantizedTensor(FP8, None, torch.tensor(1.0), None)],
            [QuantizedTensor(UINT8, None, torch.tensor(1.0), None)],
        ],
        ids=["not_quantized", "dynamic", "other_format", "asymmetric"],
    )
    def test_no_common_scale(self, others):
        assert merged_scale([self.state(1.0), *others]) is None
        assert merged_scale([]) is None
