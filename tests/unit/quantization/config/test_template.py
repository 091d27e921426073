"""Configurations of language models from names."""

import inspect
from dataclasses import replace

import pytest
from torch import nn

from quark.torch import LLMTemplate
from quark.torch.quantization.config.algo import (
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    SmoothQuantConfig,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.presets import (
    ALIASES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)

K0 = "model.layers.0.self_attn.k_proj"


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(LLMTemplate, "_registered", {})
    monkeypatch.setattr(LLMTemplate, "_schemes", {})


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "a-model-nobody-has-heard-of"])
def test_any_model_type_has_a_template(model_type):
    template = LLMTemplate.get(model_type)
    assert template.model_type == model_type
    config = template.get_config("int8_wo")
    assert config.global_quant_config == scheme("int8_wo")
    assert config.exclude == ["lm_head"]
    assert config.layer_quant_config == config.kv_cache_quant_config == {}
    assert config.algo_config is None


@pytest.mark.parametrize("name", scheme_names())
def test_every_scheme(name):
    assert LLMTemplate.get("llama").get_config(scheme=name).global_quant_config == scheme(name)


def test_list_available():
    LLMTemplate.register_template(LLMTemplate("aa_own"))
    available = LLMTemplate.list_available()
    assert {"llama", "qwen3", "gpt2", "aa_own"} <= set(available)
    assert available == sorted(set(available))


def test_registered_template():
    own = LLMTemplate(
        "gpt2", kv_layers_name=["*c_attn"], q_layer_name="*c_attn", exclude_layers_name=[]
    )
    LLMTemplate.register_template(own)
    assert LLMTemplate.get("gpt2") is own
    config = LLMTemplate.get("gpt2").get_config("fp8", kv_cache_scheme="fp8")
    assert config.exclude == []
    assert config.kv_cache_group == ["*c_attn"]
    assert LLMTemplate.get("llama") is not own


def test_registered_scheme():
    own = QuantizationConfig(weight=scheme("int2_wo_32").weight)
    LLMTemplate.register_scheme("own", own)
    assert LLMTemplate.get_supported_schemes() == [*scheme_names(), "own"]
    assert LLMTemplate.get("llama").get_config("own").global_quant_config == own
    by_layer = LLMTemplate.get("llama").get_config("int8", layer_config={"*q_proj": "own"})
    assert by_layer.layer_quant_config == {"*q_proj": own}
    LLMTemplate.unregister_scheme("own")
    assert LLMTemplate.get_supported_schemes() == scheme_names()
    with pytest.raises(ValueError, match="quant_scheme: 'own' is unknown"):
        LLMTemplate.get("llama").get_config("own")


@pytest.mark.parametrize("name", ["int8", "INT8", "int4_wo_48", "w_mx_fp4_per_group_sym", *ALIASES])
def test_a_scheme_of_the_package_is_not_replaced(name):
    before = LLMTemplate.get("llama").get_config(name)
    with pytest.raises(ValueError, match=rf"'{name}' is a scheme of this package.*Choose a name"):
        LLMTemplate.register_scheme(name, scheme("int2_wo_32"))
    assert LLMTemplate.get("llama").get_config(name) == before


def test_a_registered_scheme_is_replaced():
    LLMTemplate.register_scheme("own", scheme("int8"))
    LLMTemplate.register_scheme("own", scheme("fp8"))
    assert LLMTemplate.get("llama").get_config("own").global_quant_config == scheme("fp8")
    assert LLMTemplate.get_supported_schemes().count("own") == 1


@pytest.mark.parametrize("name", ["", " "])
def test_a_scheme_needs_a_name(name):
    with pytest.raises(ValueError, match="scheme_name: expected a name"):
        LLMTemplate.register_scheme(name, scheme("int8"))


def test_unregistering_what_is_not_registered():
    LLMTemplate.register_scheme("own_scheme", scheme("int8"))
    with pytest.raises(ValueError, match=r"registered scheme: 'own_shceme'.*'own_scheme'"):
        LLMTemplate.unregister_scheme("own_shceme")


def test_layers_types_and_exclusions():
    config = LLMTemplate.get("llama").get_config(
        "int8",
        layer_config={"*.1.*": "fp8", "*q_proj": "int4_wo_32"},
        layer_type_config={nn.Conv2d: "int8_wo"},
        exclude_layers=["*down_proj"],
        shared_scale_groups=[["q_proj", "k_proj"]],
    )
    assert list(config.layer_quant_config) == ["*.1.*", "*q_proj"]
    assert config.layer_quant_config["*q_proj"] == scheme("int4_wo_32")
    assert config.layer_type_quant_config == {nn.Conv2d: scheme("int8_wo")}
    assert config.exclude == ["*down_proj"]
    assert config.shared_scale_groups == [["q_proj", "k_proj"]]
    assert LLMTemplate.get("llama").get_config("int8", exclude_layers=[]).exclude == []


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [("nvfp4", True), ("NVFP4", True), ("fp4_block16_scale_e4m3", True), ("fp8", False)],
)
def test_what_is_served_fused_shares_the_scales_of_scales(name, is_shared):
    groups = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    config = LLMTemplate.get("llama").get_config(name)
    assert config.shared_scale_groups == (groups if is_shared else [])


def test_algorithms_by_name():
    def algorithms(*given, **options):
        return LLMTemplate.get("llama").get_config("int8", *given, **options).algo_config

    own = GPTQConfig(block_size=64)
    assert algorithms("awq") == [AWQConfig()]
    assert algorithms(["smoothquant", "gptq"]) == [SmoothQuantConfig(), GPTQConfig()]
    assert algorithms(["smooth", "gptq"], algo_configs={"gptq": own}) == [SmoothQuantConfig(), own]
    smooth = SmoothQuantConfig(alpha=0.5)
    assert algorithms("smoothquant", algo_configs={"smoothquant": smooth}) == [smooth]
    assert algorithms("smoothquant", algo_configs={"smooth": smooth}) == [smooth]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("awq", GPTQConfig(), r"options of awq are a GPTQConfig: give AWQConfig"),
        ("gptq", GPTAQConfig(), r"options of gptq are a GPTAQConfig: give GPTQConfig"),
        (
            "smoothquant",
            AWQConfig(),
            "options of smoothquant are a AWQConfig: give SmoothQuantConfig",
        ),
        ("awq", {"random_tokens": 1.0}, "options of awq are a dict: give AWQConfig"),
        ("awq", AWQConfig, "options of awq are a class: give AWQConfig"),
    ],
)
def test_options_of_another_algorithm_are_refused(name, options, said):
    """A subclass too: it names another algorithm."""
    with pytest.raises(TypeError, match=f"algo_configs: the {said}"):
        LLMTemplate.get("llama").get_config("int8", name, algo_configs={name: options})


def test_names_of_options_are_those_of_algorithms():
    own = GPTQConfig(block_size=64)
    config = LLMTemplate.get("llama").get_config("int8", "gptq", algo_configs={"GPTQ": own})
    assert config.algo_config == [own]
    with pytest.raises(ValueError, match=r"algo_configs: 'gtpq' is unknown.*mean 'gptq'"):
        LLMTemplate.get("llama").get_config("int8", "gptq", algo_configs={"gtpq": own})


def test_options_carry_the_name_of_their_class():
    with pytest.raises(ValueError, match=r"GPTQConfig\.name: expected 'gptq', got 'awq'"):
        GPTQConfig(name="awq")
    assert GPTQConfig(name="gptq") == GPTQConfig()


@pytest.mark.parametrize(
    "call",
    [
        lambda value: LLMTemplate.get(value),
        lambda value: LLMTemplate(value),
        lambda value: LLMTemplate("a", kv_layers_name=value),
        lambda value: LLMTemplate("a", q_layer_name=value),
        lambda value: LLMTemplate("a", exclude_layers_name=value),
        lambda value: LLMTemplate.register_template(value),
        lambda value: LLMTemplate.register_scheme(value, scheme("int8")),
        lambda value: LLMTemplate.register_scheme("a", value),
        lambda value: LLMTemplate.unregister_scheme(value),
        lambda value: LLMTemplate.get("llama").get_config(value),
        lambda value: LLMTemplate.get("llama").get_recipe(value),
    ],
)
@pytest.mark.parametrize("value", [3, [3], {"a": 1}, object()], ids=["int", "list", "dict", "any"])
def test_methods_refuse_values_of_other_types(call, value):
    with pytest.raises(TypeError, match=r"^\w+( \w+)?(\[0\])?: expected "):
        call(value)
    assert LLMTemplate.get_supported_schemes() == scheme_names()


ARGUMENTS = list(inspect.signature(LLMTemplate.get_config).parameters)[2:]


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("value", [b"x", "zz", [3], {"a": 3}, object()], ids=type)
def test_arguments_of_get_config_are_refused_by_name(name, value):
    if (name, value) == ("exclude_layers", "zz"):
        return  # one pattern
    with pytest.raises((TypeError, ValueError), match=name):
        given = {"kv_cache_scheme": "fp8", name: value}
        LLMTemplate.get("llama").get_config("int8", **given)


@pytest.mark.parametrize("scale", [-1, float("nan"), float("inf"), "1"])
def test_bounds_of_cache_scales_are_numbers(scale):
    with pytest.raises((TypeError, ValueError), match=f"min_kv_scale.*got '?{scale}"):
        LLMTemplate.get("llama").get_config("int8", kv_cache_scheme="fp8", min_kv_scale=scale)


def test_a_bound_without_a_cache_warns(caplog):
    LLMTemplate.get("llama").get_config("int8", min_kv_scale=0.5)
    assert "min_kv_scale=0.5 has no effect without kv_cache_scheme" in caplog.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheme": "int8_w"}, "quant_scheme: 'int8_w'.*Did you mean 'int8_wo'"),
        ({"scheme": "int8", "kv_cache_scheme": "pf8"}, "kv_cache_scheme: 'pf8'.*'fp8'"),
        ({"scheme": "int8", "layer_config": {"*": "fp9"}}, "quant_scheme: 'fp9'"),
        ({"scheme": "int8", "algorithm": "gtpq"}, "algorithm: 'gtpq'.*Did you mean 'gptq'"),
        ({"scheme": "int8", "attention_scheme": "pf8"}, "attention_scheme: 'pf8'.*'fp8'"),
        (
            {"scheme": "int8", "attention_scheme": "qkv_fp8", "kv_cache_scheme": "int8_per_head"},
            "'qkv_fp8' quantizes keys and values by 'fp8', but the scheme of the cache is 'int8_",
        ),
    ],
    ids=["scheme", "cache", "layer", "algorithm", "attention", "attention and cache"],
)
def test_refused(given, said):
    with pytest.raises(ValueError, match=said):
        LLMTemplate.get("llama").get_config(**given)


def test_cache():
    config = LLMTemplate.get("llama").get_config("int8_wo", kv_cache_scheme="fp8", min_kv_scale=0.5)
    cached = replace(scheme("int8_wo"), output_tensors=kv_cache_scheme("fp8"))
    assert config.kv_cache_quant_config == {"*k_proj": cached, "*v_proj": cached}
    assert config.layer_quant_config == config.kv_cache_quant_config
    assert config.kv_cache_group == ["*k_proj", "*v_proj"]
    assert config.min_kv_scale == 0.5
    assert config_for(K0, nn.Linear, config) == cached
    assert config_for("model.layers.0.self_attn.q_proj", nn.Linear, config) == scheme("int8_wo")


@pytest.mark.parametrize("cache", [None, "int8_per_head"])
def test_queries_keys_and_values(cache):
    options = {"attention_scheme": "qkv_int8_per_head", "kv_cache_scheme": cache}
    config = LLMTemplate.get("llama").get_config("int8_wo", min_kv_scale=0.5, **options)
    spec = kv_cache_scheme("int8_per_head")
    assert config.query_quant_config == {"*q_proj": QuantizationConfig(output_tensors=spec)}
    assert config.kv_cache_post_rope and config.softmax_quant_spec is None
    assert config.min_kv_scale == 0.5
    for name in ("q_proj", "k_proj", "v_proj"):
        layer = config_for(f"model.layers.0.self_attn.{name}", nn.Linear, config)
        assert layer == replace(scheme("int8_wo"), output_tensors=spec)


def test_cache_of_excluded_layers_quantizes_their_outputs_alone():
    config = with_kv_cache(Config(scheme("int8_wo"), exclude=["*k_proj"]), ["*k_proj"], "fp8")
    expected = QuantizationConfig(output_tensors=kv_cache_scheme("fp8"))
    assert config.kv_cache_quant_config == {"*k_proj": expected}
    assert config_for(K0, nn.Linear, config) == expected


@pytest.mark.parametrize("pattern", ["*k_proj", "*.0.*", "*self_attn*"])
def test_cache_keeps_the_scheme_that_a_layer_was_given(pattern):
    config = LLMTemplate.get("llama").get_config(
        "int8_wo", layer_config={pattern: "int4_wo_32"}, kv_cache_scheme="fp8"
    )
    assert config_for(K0, nn.Linear, config) == replace(
        scheme("int4_wo_32"), output_tensors=kv_cache_scheme("fp8")
    )


def test_cache_leaves_the_given_configuration_alone():
    config = Config(scheme("int8_wo"))
    with_kv_cache(config, ["*k_proj"], "fp8", min_kv_scale=0.5)
    assert config == Config(scheme("int8_wo"))


def test_a_configuration_of_a_template():
    """The documented order of arguments is that of ``get_config``."""
    template = LLMTemplate.get("llama")
    arguments = ("fp8", "gptq", "fp8", 0.5, None, {"*down_proj": "int8"}, None, ["*lm_head"])
    assert Config.with_llm_template(template, *arguments) == template.get_config(*arguments)
    named = {"algorithm": ["awq"], "kv_cache_scheme": "fp8", "attention_scheme": "fp8"}
    made = Config.with_llm_template(template, scheme="fp8", **named)
    assert made == template.get_config("fp8", **named)
