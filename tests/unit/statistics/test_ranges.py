"""Ranges and tokens that statistics keep, and static ranges that are settled by them."""

from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.quantization.config.algo import AWQConfig, GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import PARTS
from quark.torch.statistics import collection as module


@pytest.fixture
def statistics(build, batches):
    return collect_statistics(build(), batches, probes=0)


def passing(model, data):
    """(layer, tensor) -> what went into a layer and came out, (tokens, channels)."""
    seen = {}

    def keep(name):
        def hook(layer, args, output):
            for tensor, x in (("input_tensors", args[0]), ("output_tensors", output)):
                seen.setdefault((name, tensor), []).append(x.flatten(0, -2))

        return hook

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(keep(name))
    with torch.no_grad():
        for batch in data:
            model(**batch) if isinstance(batch, dict) else model(batch)
    return {place: torch.cat(rows) for place, rows in seen.items()}


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_ranges_are_those_of_what_passes(name, build, batches):
    found = collect_statistics(build(name), batches, probes=0)
    for (layer, tensor), x in passing(build(name), batches).items():
        if layer == "lm_head":
            continue
        kept = found.range_of(layer, tensor)
        assert torch.equal(kept.channels.lo, x.amin(0)), layer
        assert torch.equal(kept.channels.hi, x.amax(0)), layer
        limit, bins = kept.histogram.limit, len(kept.histogram.counts)
        expected = torch.histc(x.double(), bins, -limit, limit)  # bins are exact in float64
        assert torch.equal(kept.histogram.counts.double(), expected), layer


def test_padding_is_in_no_range(build, config_of):
    ids = torch.full((2, 9), 2)
    ids[:, 4:] = torch.randint(3, 64, (2, 5))
    mask = (ids != 2).long()
    data = [{"input_ids": ids, "attention_mask": mask}]
    found = collect_statistics(build(), data, probes=0)
    x = passing(build(), data)["model.layers.0.self_attn.q_proj", "input_tensors"]
    first = found.first_reader("model.layers.0.self_attn.q_proj")
    x = x[mask.flatten().bool()]
    assert torch.equal(found.range_of(first, "input_tensors").channels.hi, x.amax(0))
    assert torch.equal(found.samples[first], x)


@pytest.mark.parametrize("size", [5, 1000])
def test_the_same_tokens_are_kept_however_data_is_cut(size, build, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", size)
    ids = torch.randint(3, 64, (6, 8))
    kept = [
        collect_statistics(build(), ids.split(step), probes=0).sample("model.layers.0.mlp.up_proj")
        for step in (6, 1)
    ]
    assert len(kept[0]) == min(size, 48)
    torch.testing.assert_close(*kept)


def test_nothing_finite_is_an_error(build, batches):
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3] = 3e38  # outputs overflow
    with pytest.raises(ValueError, match=r"outputs of model.layers.1.mlp.down_proj were NaN"):
        collect_statistics(model, batches)


def test_a_layer_that_reads_a_vector(build, batches):
    model = build()
    block = model.model.layers[0].mlp
    block.gate, forward = torch.nn.Linear(64, 64), block.forward
    seen = []

    def gated(x):
        y = forward(x)
        seen.append(block.gate(y.mean((0, 1))))
        return y * seen[-1].sigmoid()

    block.forward = gated
    found = collect_statistics(model, batches[:1], probes=0)
    kept = found.range_of("model.layers.0.mlp.gate", "output_tensors")
    assert torch.equal(kept.channels.hi, seen[-1])


def static(dtype="int8", **fields):
    fields = {"qscheme": "per_tensor", "symmetric": True, "is_dynamic": False} | fields
    return QuantizationSpec(dtype, **fields)


INPUTS = {
    "int8": static(),
    "asymmetric": static("uint8", symmetric=False),
    "fp8": static("fp8_e4m3", symmetric=None),
    "power of two": static(observer_cls="PerTensorPowOf2MinMaxObserver"),
    "percentile": static(observer_cls="PerTensorPercentileObserver"),
    "least error": static(observer_cls="PerTensorMSEObserver"),
    "channels": static(qscheme="per_channel", ch_axis=-1),
    "scale of scales": scheme("nvfp4").input_tensors,
}


def settled(model, config, **given):
    ModelQuantizer(config).quantize_model(model, **given)
    return {
        (name, tensor, part): value
        for name, layer in model.named_modules()
        if hasattr(layer, "quantizers")
        for tensor, quantizer in layer.quantizers().items()
        for part in PARTS
        if (value := getattr(quantizer, part)) is not None
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.sampled(3)
def test_ranges_are_settled_as_by_data(inputs, dtype, build, batches):
    layer = QuantizationConfig(weight=static(), input_tensors=inputs, output_tensors=inputs)
    config = Config(layer, exclude=["lm_head"])
    found = collect_statistics(build(dtype=dtype), batches, probes=0)
    expected = settled(build(dtype=dtype), config, dataloader=batches)
    assert {tensor for _, tensor, _ in expected} == {"weight", "input_tensors", "output_tensors"}
    assert same(settled(build(dtype=dtype), config, statistics=found), expected)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_cache_and_shared_scales_are_settled_as_by_data(name, build, batches):
    cache = QuantizationConfig(input_tensors=static(), weight=static(), output_tensors=static())
    config = Config(
        scheme("int8"),
        kv_cache_quant_config={"*k_proj": cache, "*v_proj": cache},
        shared_scale_groups=[["q_proj", "k_proj", "v_proj"]],
        exclude=["lm_head"],
    )
    found = collect_statistics(build(name), batches, probes=0)
    expected = settled(build(name), config, dataloader=batches)
    assert same(settled(build(name), config, statistics=found), expected)


def test_experts_without_data_take_the_widest_range(build, caplog):
    data = [torch.tensor([[5, 5]])]
    makes = {"num_local_experts": 8, "num_experts_per_tok": 1}
    config = Config(scheme("int8"), exclude=["lm_head", "*gate"])
    found = collect_statistics(build("mixtral", **makes), data, probes=0)
    expected = settled(build("mixtral", **makes), config, dataloader=data)
    caplog.clear()
    assert same(settled(build("mixtral", **makes), config, statistics=found), expected)
    assert "take the widest range" in caplog.text


def test_gptq_and_ranges_are_both_from_statistics(build, statistics, config_of):
    """Ranges stay those of the float model, whatever rounding makes of its weights."""
    config = config_of("w_uint4_per_group_a_int8_per_tensor", algo_config=[GPTQConfig()])
    alone = config_of("w_uint4_per_group_a_int8_per_tensor")
    found = settled(build(), config, statistics=statistics)
    plain = settled(build(), alone, statistics=statistics)
    inputs = {key for key in plain if key[1] == "input_tensors"}
    assert inputs and all(torch.equal(found[key], plain[key]) for key in inputs)


def with_inputs(**fields):
    return Config(
        QuantizationConfig(weight=static(), input_tensors=static(**fields)), exclude=["lm_head"]
    )


REFUSED = {
    "order": (
        with_inputs(observer_cls="MovingAverageMinMaxObserver"),
        r"q_proj.input_tensors: MovingAverageMinMaxObserver needs the data itself",
    ),
    "axis": (with_inputs(qscheme="per_channel", ch_axis=1), "PerChannelMinMaxObserver needs"),
    "head": (Config(scheme("int8")), "lack lm_head"),
    "rescaled": (replace(with_inputs(), algo_config=[AWQConfig()]), "awq rescales inputs"),
    "nothing to do": (Config(scheme("int8_wo"), exclude=["lm_head"]), "got none"),
    "rotary": (
        Config(
            scheme("int8_wo"),
            kv_cache_quant_config={"*k_proj": QuantizationConfig(output_tensors=static())},
            kv_cache_post_rope=True,
            exclude=["lm_head"],
        ),
        "keys before rotary embedding",
    ),
}


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED)
def test_what_ranges_do_not_tell_is_refused(config, said, build, statistics, unchanged):
    model = build()
    with unchanged(model), pytest.raises(ValueError, match=said):
        ModelQuantizer(config).quantize_model(model, statistics=statistics)


def test_data_comes_first(build, batches, statistics):
    """With data too, what only data tells can be settled."""
    config = REFUSED["order"][0]
    expected = settled(build(), config, dataloader=batches)
    assert same(settled(build(), config, dataloader=batches, statistics=statistics), expected)
