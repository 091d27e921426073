"""Figures of a report against what is computed by hand from the tensors themselves."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from quark.torch.export.api import export_safetensors
from quark.torch.numerics.hadamard import hadamard, rotate
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.presets import scheme
from quark.torch.report import measurement
from quark.torch.report.measurement import measure
from quark.torch.report.weights import compare, histogram, scales_of, values_of

WINDOWS = torch.randint(3, 64, (3, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def quantized(build, batches, tmp_path):
    """Save a model, quantize it, and return both directories and the quantized model."""

    def quantized(name, model="llama", custom_mode="quark", exclude=("lm_head",), **changes):
        original, path = tmp_path / "original", tmp_path / "quantized"
        made = build(model, **changes)
        made.save_pretrained(original)
        layer = scheme(name) if isinstance(name, str) else name
        config = Config(global_quant_config=layer, exclude=list(exclude))
        made = ModelQuantizer(config).quantize_model(made, batches)
        made = ModelQuantizer.freeze(made)
        export_safetensors(made, path, custom_mode=custom_mode)
        return original, path, made

    return quantized


def by_name(report):
    return {layer.name: layer for layer in report.layers}


def test_errors_of_weights(quantized):
    original, path, model = quantized("int4_wo_32")
    floats = load_file(original / "model.safetensors")
    found = by_name(measure(path, original))
    assert len(found) == 14
    for name, layer in found.items():
        before, after = floats[f"{name}.weight"], model.get_submodule(name).weight.detach()
        noise, signal = (after - before).square().sum(), before.square().sum()
        assert layer.error.change == "rounded"
        assert layer.error.relative == pytest.approx(float((noise / signal).sqrt()), rel=1e-5)
        assert layer.error.sqnr == pytest.approx(float(10 * (signal / noise).log10()), rel=1e-5)
        assert layer.values.peak == pytest.approx(
            float(after.abs().max() / after.square().mean().sqrt()), rel=1e-5
        )
        assert layer.original.largest == pytest.approx(float(before.abs().max()))
        assert layer.weights == before.numel()


def test_sizes_are_those_of_the_file(quantized):
    original, path, _ = quantized("uint4_wo_32")
    stored = load_file(path / "model.safetensors")
    report = measure(path, original)
    assert report.bytes == sum(t.nbytes for t in stored.values())
    assert report.original_bytes == sum(
        t.nbytes for t in load_file(original / "model.safetensors").values()
    )
    for layer in report.layers:
        assert layer.bytes == sum(
            t.nbytes for key, t in stored.items() if key.startswith(f"{layer.name}.weight")
        )
    assert sum(kind.bytes for kind in report.kinds) == report.bytes
    assert {kind.name: kind.layers for kind in report.kinds if kind.is_quantized} == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 2
    )


def test_outputs_inputs_and_tokens(quantized, build):
    """The first projections read the same in both models, so all can be computed from them."""
    original, path, model = quantized("int8")
    name = "model.layers.0.self_attn.q_proj"
    layer, seen = model.get_submodule(name), []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(WINDOWS).logits
    handle.remove()
    x = seen[0].flatten(0, 1)
    with torch.no_grad():
        expected = x @ build("llama").get_submodule(name).weight.T
        error = (layer(x) - expected).norm() / expected.norm()
    report = measure(path, original, WINDOWS, "text")
    found = by_name(report)[name]
    assert found.output_error == pytest.approx(float(error), rel=1e-3)
    assert found.inputs.tokens == x.shape[0] == 48
    assert found.inputs.values.largest == pytest.approx(float(x.abs().max()))
    ranges = x.abs().amax(0)
    widest = found.inputs.channels[0]
    assert (widest.index, widest.largest) == (int(ranges.argmax()), pytest.approx(ranges.max()))
    assert widest.ratio == pytest.approx(float(ranges.max() / ranges.median()))
    scale = model.get_submodule(name).input_quantizer.scale
    rounded = (x / scale).round().clamp(-128, 127) * scale
    assert found.inputs.error == pytest.approx(float((rounded - x).norm() / x.norm()), rel=1e-3)
    clipped = (x.abs() > rounded.abs().max()).float().mean()
    assert found.inputs.clipped == pytest.approx(float(clipped))
    lost = F.cross_entropy(logits[:, :-1].flatten(0, 1), WINDOWS[:, 1:].flatten())
    assert report.predictions.perplexity == pytest.approx(float(lost.exp()), rel=1e-4)
    assert report.text.tokens == 16


@pytest.mark.parametrize("axis", [-1, 2])
def test_inputs_with_a_scale_for_each_channel(axis, quantized):
    inputs = QuantizationSpec("int8", qscheme="per_channel", ch_axis=axis, is_dynamic=False)
    original, path, model = quantized(
        QuantizationConfig(weight=scheme("int8_wo").weight, input_tensors=inputs)
    )
    name = "model.layers.0.self_attn.q_proj"
    x, scales = model.model.embed_tokens(WINDOWS), model.get_submodule(name).input_quantizer.scale
    x = model.model.layers[0].input_layernorm(x).detach()
    rounded = (x / scales).round().clamp(-128, 127) * scales
    found = by_name(measure(path, original, WINDOWS, "text"))[name].inputs
    assert len(scales) == x.shape[-1]
    assert found.error == pytest.approx(float((rounded - x).norm() / x.norm()), rel=1e-3)


def test_predictions(quantized, build):
    original, path, model = quantized("int3_wo_32")
    with torch.no_grad():
        before, after = (m(WINDOWS).logits.log_softmax(-1) for m in (build("llama"), model))
    expected = F.kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()
    found = measure(path, original, WINDOWS, batch_size=2).predictions
    assert found.positions == WINDOWS.numel()
    assert found.kl == pytest.approx(float(expected), rel=1e-4)
    same = before.argmax(-1) == after.argmax(-1)
    assert found.agreement == pytest.approx(float(same.float().mean()))
    assert found.perplexity != found.original


def test_without_original_or_data(quantized):
    _, path, _ = quantized("int8_wo")
    report = measure(path)
    assert report.predictions is report.text is report.original_bytes is None
    layer = report.layers[0]
    assert layer.error is layer.original is layer.inputs is layer.output_error is None
    assert layer.histogram.before is None
    assert sum(layer.histogram.after) == layer.weights
    assert [worst.measure for worst in report.worst] == ["outliers"] * 5
    assert "--dataset" in report.verdict[-1]


def test_data_alone(quantized):
    _, path, _ = quantized("int8_wo")
    report = measure(path, windows=WINDOWS)
    assert report.predictions.original is report.predictions.kl is None
    assert report.layers[0].inputs.tokens == 48
    assert report.layers[0].inputs.error is None  # weights alone are quantized
    assert "--original" in report.verdict[-1]


@pytest.mark.parametrize(
    ("custom_mode", "name"),
    [("awq", "uint4_wo_32"), ("gptq", "int4_wo_32"), ("compressed-tensors", "fp8"), ("fp8", "fp8")],
)
def test_other_formats_say_the_same(custom_mode, name, quantized, tmp_path):
    original, path, model = quantized(name, custom_mode=custom_mode)
    report = measure(path, original)
    assert report.method == custom_mode
    floats = load_file(original / "model.safetensors")
    for layer in report.layers:
        after = model.get_submodule(layer.name).weight.detach()
        before = floats[f"{layer.name}.weight"]
        error = float((after - before).norm() / before.norm())
        assert layer.error.relative == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(("model", "parts"), [("mixtral", 3), ("gpt_oss", 2)])
def test_experts_whether_stored_apart_or_stacked(model, parts, quantized):
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    original, path, _ = quantized("int4_wo_32", model, **sizes)
    stored = load_file(original / "model.safetensors")
    assert any(tensor.dim() == 3 for tensor in stored.values()) == (model == "gpt_oss")
    report = measure(path, original, WINDOWS)
    names = [layer.name for layer in report.layers if ".experts." in layer.name]
    assert len(names) == 2 * 4 * parts
    assert all(layer.error.change == "rounded" for layer in report.layers)
    assert len(report.experts) == 2
    for tokens in report.experts.values():
        assert sum(tokens) == 2 * WINDOWS.numel()
    assert report.routers.keys() == report.experts.keys()
    assert all(0.5 < share < 1 for share in report.routers.values())


def test_what_stays_in_float(quantized):
    _, path, _ = quantized("int4_wo_32", exclude=["lm_head", "*down_proj"])
    reasons = {part.name: part.reason for part in measure(path).floats}
    assert reasons["lm_head"] == "excluded by 'lm_head'"
    assert "down_proj" in reasons["model.layers.0.mlp.down_proj"]
    assert "Embedding" in reasons["model.embed_tokens"]
    assert "LlamaRMSNorm" in reasons["model.norm"]


def test_a_tied_head(quantized):
    original, path, _ = quantized("int8_wo", "tied", exclude=())
    assert "lm_head.weight" not in load_file(original / "model.safetensors")
    assert by_name(measure(path, original))["lm_head"].error.relative < 0.01


def test_another_model_is_refused(quantized, build, tmp_path):
    _, path, _ = quantized("int8_wo")
    other = tmp_path / "other"
    build("llama", intermediate_size=64).save_pretrained(other)
    with pytest.raises(ValueError, match=r"gate_proj is \[64, 64\], the quantized layer is \[96"):
        measure(path, other)


def test_a_quantized_original_is_dequantized(quantized):
    _, path, _ = quantized("int8_wo", "mixtral", num_local_experts=4)
    layers = by_name(measure(path, path, WINDOWS)).values()
    assert [layer.error.relative for layer in layers] == [0.0] * len(layers)


def test_the_numbers_are_json(quantized):
    original, path, _ = quantized("fp8")
    report = measure(path, original, WINDOWS)
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    layer, first = data["layers"][0], report.layers[0]
    assert layer["bits_per_weight"] == 8 * first.bytes / first.weights
    assert layer["values"]["peak"] == first.values.peak
    assert layer["shape"] == list(first.shape)


WEIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))


def test_a_rescaled_weight_is_known_and_its_error_is_that_of_rounding():
    factors = torch.rand(96).exp2() * torch.logspace(-1, 1, 96)
    rescaled = WEIGHT * factors / torch.linspace(0.5, 2, 64)[:, None]
    rounded = (rescaled * 8).round() / 8
    error, reference = compare(WEIGHT, rounded)
    assert error.change == "rescaled"
    exact = float((rounded - rescaled).norm() / rescaled.norm())
    assert error.relative == pytest.approx(exact, rel=0.05)
    torch.testing.assert_close(reference, rescaled, rtol=0.1, atol=0.1)


def test_rows_that_are_rounded_to_zero_are_an_error():
    weight = WEIGHT.clone()
    weight[::2] *= 0.01
    error, _ = compare(weight, weight.round())
    assert error.change == "rounded"


def test_a_rotated_weight_has_no_error():
    assert compare(WEIGHT, rotate(WEIGHT, hadamard(32)))[0].change == "other"


def test_an_exact_weight():
    error, reference = compare(WEIGHT, WEIGHT.clone())
    assert (error.relative, error.sqnr) == (0.0, None)
    assert reference is WEIGHT


def test_a_histogram_counts_everything():
    before = torch.tensor([-2.0, -0.1, 0.0, 0.1, 2.0])
    found = histogram(before, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert found.limit == 2.0
    assert (found.before[0], found.before[-1], sum(found.before)) == (1, 1, 5)
    assert (found.after[30], sum(found.after)) == (4, 5)


def test_scales():
    found = scales_of(torch.tensor([0.0, 0.25, 0.3, 0.5, 1.0]))
    assert (found.count, found.zeros, found.least, found.most) == (5, 1, 0.25, 1.0)
    assert (found.exponent, found.powers) == (-2, [2, 1, 1])
    assert scales_of(None) is None
    assert scales_of(torch.zeros(3)).powers == []


def test_values_of_nothing_and_of_zeros():
    assert values_of(torch.zeros(0)).peak == values_of(torch.zeros(4)).peak == 0.0
    assert values_of(torch.tensor([3.0, 4.0])).rms == pytest.approx(math.sqrt(12.5))


@pytest.mark.parametrize("exclude", [("lm_head",), ()])
def test_a_model_that_is_read_in_parts_has_the_same_figures(quantized, exclude, monkeypatch):
    original, path, _ = quantized("int8", exclude=exclude)
    whole = measure(path, original, WINDOWS, "text", batch_size=1)
    asked = []
    # What an evaluation keeps is all in files.
    monkeypatch.setattr(measurement, "results_limit", lambda *args: asked.append(args) or 0)
    parts = measure(path, original, WINDOWS, "text", batch_size=1, max_memory=1 << 40)
    assert asked == [(True, 1 << 40, "cpu")]
    assert parts.to_dict() == whole.to_dict()
    assert whole.predictions.kl > 0
    assert by_name(parts)["model.layers.0.mlp.up_proj"].inputs.tokens == WINDOWS.numel()
