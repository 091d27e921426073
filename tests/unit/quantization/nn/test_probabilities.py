"""Queries and probabilities of attention that are quantized (``attention_scheme``)."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BartConfig, BartForConditionalGeneration
from transformers.models.llama import modeling_llama

from quark.torch import LLMTemplate, ModelExporter, ModelImporter, ModelQuantizer, save_params
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    GPTQConfig,
    Int8PerTensorSpec,
    QATSpec,
    QuantizationConfig,
)
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.probabilities import probability_quantizers
from tests import configurations
from tests.models.architectures import build as build_small
from tests.models.architectures import small_config, tokens
from tests.models.test_streamed import contents, in_memory, streamed
from tests.unit.quantization.nn.caches import FP8, IDS

quantized = partial(configurations.quantized, data=[IDS])
DYNAMIC = FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec()


@torch.no_grad()
def logits_of(model, **batch):
    return model(**(batch or {"input_ids": IDS})).logits


def attention_config(scheme="fp8", kv_cache=None, **options):
    template = LLMTemplate.get("llama")
    return template.get_config(scheme, attention_scheme="fp8", kv_cache_scheme=kv_cache, **options)


def only_softmax(spec=FP8, **options):
    """Weights of the values alone, so that attention modules have a quantized layer."""
    layers = {"*v_proj": scheme("int8_wo")}
    return Config(layer_quant_config=layers, softmax_quant_spec=spec, **options)


def rounded(x, scale=1 / 448):
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.fixture
def by_hand(monkeypatch):
    """Compute the logits of a model whose attention rounds what its softmax returns."""

    def by_hand(model, scales, **batch):
        model.set_attn_implementation("eager")
        running = []  # scale of the attention module that computes
        for name, scale in scales.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, scale=scale: running.append(scale))
        softmax = nn.functional.softmax

        def round_softmax(*args, **kwargs):
            y = softmax(*args, **kwargs)
            return rounded(y, running.pop()) if running else y

        monkeypatch.setattr(nn.functional, "softmax", round_softmax)
        return logits_of(model, **batch)

    return by_hand


def bart():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
    )
    return BartForConditionalGeneration(config).eval()


# ---- what is computed ---------------------------------------------------------------------------


def scales_of(model):
    return {name: quantizer.scale for name, quantizer in probability_quantizers(model)}


FLOAT = replace(only_softmax(), softmax_quant_spec=None)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_probabilities_are_quantized_behind_softmax(heads, build, by_hand):
    """Against a float model whose softmax is rounded; 4 query heads, so 1 and 2 are grouped."""
    build = partial(build, num_attention_heads=4, num_key_value_heads=heads)
    model = quantized(build(), only_softmax())
    for scale in scales_of(model).values():
        assert float(scale) == pytest.approx(1 / 448)  # the first token sees itself alone
    found, expected = logits_of(model), quantized(build(), FLOAT)
    plain = logits_of(expected)
    expected = by_hand(expected, scales_of(model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float((found - plain).abs().max()) > 1e-4


def test_encoder_decoder(by_hand):
    batch = {"input_ids": IDS, "decoder_input_ids": IDS[:, :7]}
    model = quantized(bart(), only_softmax(), data=[batch])
    names = [name.rpartition(".")[2] for name, _ in probability_quantizers(model)]
    assert sorted(names) == ["encoder_attn", "self_attn", "self_attn"]
    found, expected = logits_of(model, **batch), quantized(bart(), FLOAT, data=[batch])
    expected = by_hand(expected, scales_of(model), **batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_sinks_and_scores_that_are_capped(name, by_hand):
    def make(config):
        model = build_small(small_config(name), torch.float32)
        return quantized(model, config, data=[tokens()])

    model, batch = make(only_softmax()), {"input_ids": tokens()}
    found = logits_of(model, **batch)
    expected = by_hand(make(FLOAT), scales_of(model), **batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_queries_are_quantized_at_their_projection(build):
    model = quantized(build(), attention_config("int8_wo"))
    seen = []
    layer = model.model.layers[0].self_attn.q_proj
    hook = layer.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    logits_of(model)
    hook.remove()
    x, y = seen[0]
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    scale = layer.output_quantizer.scale
    assert torch.equal(y, rounded(expected, scale)) and not torch.equal(y, expected)
    assert model.model.layers[0].self_attn.k_proj.output_quantizer is None


def test_a_model_of_another_attention_function_is_set_to_eager(build):
    model = build(attn_implementation="sdpa")
    quantized(model, only_softmax(DYNAMIC))
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"call model.set_attn_implementation\('eager'\)"):
        logits_of(model)


def test_algorithms_see_probabilities_in_float(build):
    config = attention_config("int4_wo_32", algorithm="gptq")
    after = dict(quantized(build(), config).named_parameters())
    plain = LLMTemplate.get("llama").get_config("int4_wo_32", algorithm="gptq")
    plain.algo_config = [GPTQConfig()]
    model = build(attn_implementation="eager")
    for name, value in quantized(model, plain).named_parameters():
        assert torch.equal(after[name], value)


# ---- to a checkpoint and back -------------------------------------------------------------------


@pytest.mark.parametrize("spec", [FP8, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("post_rope", [False, True], ids=["keys before", "keys after"])
@pytest.mark.sampled(2, covers=True)
def test_a_model_comes_back_bit_by_bit(spec, post_rope, build, export):
    config = attention_config("fp8", "fp8")
    config = replace(config, softmax_quant_spec=spec, kv_cache_post_rope=post_rope)
    model = quantized(build(), config)
    expected, path = logits_of(model), export(model)
    stored = load_file(path / "model.safetensors")
    scales = [name for name in stored if name.endswith("self_attn.prob_output_scale")]
    assert len(scales) == (0 if spec.is_dynamic else model.config.num_hidden_layers)
    for device in ("cpu", "meta"):
        read = ModelImporter(path, "safetensors").import_model_info(build(device=device))
        assert torch.equal(logits_of(read), expected)
    loaded = AutoModelForCausalLM.from_pretrained(export(read), dtype="auto")
    assert torch.equal(logits_of(loaded), expected)
    again = ModelImporter(export(loaded), "safetensors").import_model_info(build())
    assert torch.equal(logits_of(again), expected)


def test_a_model_that_is_read_in_parts(build, tmp_path):
    """The same files as in memory."""
    build(dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    files = []
    for load in (in_memory, streamed):
        model = load(tmp_path / "model")
        config = replace(attention_config("fp8", "fp8"), kv_cache_post_rope=True)
        place = tmp_path / load.__name__
        ModelExporter(None, place).export_safetensors_model(quantized(model, config))
        files.append(contents(place))
    assert files[0] == files[1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), None])
def test_damaged_scales_are_refused(value, build, export):
    path = export(quantized(build(), only_softmax()))
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if name.endswith("prob_output_scale"))
    if value is None:
        del stored[name]
    else:
        stored[name] = torch.tensor(value)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"prob_output.*scale"):
        ModelImporter(path, "safetensors").import_model_info(build())


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["compressed-tensors", "fp8"])
def test_formats_that_cannot_tell(mode, build, export):
    with pytest.raises(ValueError, match="probabilities of attention are quantized"):
        export(quantized(build(), only_softmax()), custom_mode=mode)


def test_files_of_parameters_cannot_tell(build, tmp_path):
    with pytest.raises(ValueError, match="cannot tell that probabilities"):
        save_params(quantized(build(), only_softmax()), "llama", export_dir=tmp_path)


SPECS = {
    "int8": (Int8PerTensorSpec().to_quantization_spec(), "take a float format"),
    "groups": (scheme("mxfp4").weight, "take a float format with one scale per tensor"),
    "trained": (replace(FP8, qat_spec=QATSpec()), "does not train"),
}


@pytest.mark.parametrize(("spec", "said"), SPECS.values(), ids=SPECS)
def test_other_formats_are_refused(spec, said, build, unchanged):
    model = build()
    with unchanged(model), pytest.raises(ValueError, match=said):
        ModelQuantizer(only_softmax(spec)).quantize_model(model, [IDS])


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_attention_without_the_interface_is_refused(name, unchanged):
    model = build_small(small_config(name), torch.float32)
    layer = QuantizationConfig(weight=scheme("int8_wo").weight)
    config = Config(layer, softmax_quant_spec=FP8, exclude=["lm_head"])
    with unchanged(model), pytest.raises(ValueError, match="attention interface"):
        ModelQuantizer(config).quantize_model(model, [tokens()])


def test_attention_that_does_not_run_is_refused(build, unchanged):
    model = build()
    model.spare = modeling_llama.LlamaAttention(model.config, 0)
    with unchanged(model), pytest.raises(ValueError, match="spare did not run"):
        ModelQuantizer(only_softmax()).quantize_model(model, [IDS])


def test_static_probabilities_need_data(build):
    with pytest.raises(ValueError, match="calibration data"):
        ModelQuantizer(only_softmax()).quantize_model(build())
    ModelQuantizer(only_softmax(DYNAMIC)).quantize_model(build())


def test_layers_that_may_be_queries_are_refused():
    with pytest.raises(ValueError, match=r"'\*layers.0.\*' may match queries"):
        attention_config(layer_config={"*layers.0.*": "int8"})
    config = attention_config(layer_config={"*down_proj": "int8", "*q_proj": "int8_wo"})
    queries = config.layer_quant_config["*q_proj"]
    assert queries.weight == scheme("int8_wo").weight and queries.output_tensors.dtype is FP8.dtype
    with pytest.raises(ValueError, match="fp8"):
        LLMTemplate.get("llama").get_config("fp8", attention_scheme="int8")
