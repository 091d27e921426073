"""Checkpoints through an unmodified Transformers, which knows nothing of this package's writers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelExporter
from quark.torch.export import ExporterConfig, JsonExporterConfig
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
)
from quark.torch.quantization.config.kv_cache import with_kv_cache
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.nn.operators import QParamsLinear
from quark.torch.quantization.nn.packed import PackedLayer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = ["real_quantized", "fake_quantized"]
CACHE = ["*k_proj", "*v_proj"]
INT8 = Int8PerTensorSpec().to_quantization_spec()


@pytest.fixture(autouse=True)
def quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def load():
    from transformers import AutoModelForCausalLM

    def load(path, **options):
        model, report = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, **options
        )
        assert not any(report.values()), report  # nothing missing, unexpected or mismatched
        return model

    return load


class TestReload:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("kind", ["llama", "tied", "opt"])
    @pytest.mark.sampled(6)
    def test_bit_for_bit(
        self, build, quantize, export, config_of, logits, load, kind, weight_format, dtype
    ):
        """Every scheme, the head included, under the type that config.json names."""
        names = scheme_names() if kind == "llama" and dtype == torch.float32 else SOME
        for name in names:
            if name.endswith(("_64", "_128")):
                continue  # the same as _32
            model = quantize(build(kind, dtype=dtype, num_hidden_layers=1), config_of(name, []))
            found = load(export(model, weight_format=weight_format))
            assert found.dtype == dtype
            assert torch.equal(logits(found), logits(model)), name

    def test_a_model_converted_after_it_was_made(self, build, quantize, export, logits, load):
        """Its configuration names another type, or none."""
        model = build()
        frequencies = model.model.rotary_emb.inv_freq
        model.bfloat16()
        model.model.rotary_emb.inv_freq = frequencies  # which Transformers keeps in float32
        assert model.config.dtype == torch.float32
        quantize(model, "int8")
        found = load(export(model))
        assert found.dtype == torch.bfloat16
        assert torch.equal(logits(found), logits(model))

    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("name", ["int8", "w_int8_per_tensor_sym"])
    def test_float_weights_are_not_taken_for_codes(
        self, build, quantize, export, load, weight_format, name
    ):
        """Scales per tensor have one shape for codes and values: only config.json tells."""
        model = quantize(build(), name)
        layer = load(export(model, weight_format=weight_format)).model.layers[0].mlp.up_proj
        expected = torch.int8 if weight_format == "real_quantized" else torch.float32
        assert layer.state_dict()["weight"].dtype == expected
        assert layer.weight.dtype == torch.float32
        assert torch.equal(layer.value("weight"), model.model.layers[0].mlp.up_proj.weight)

    def test_another_type_on_loading(self, build, quantize, export, logits, load):
        for name in ("int8_wo", "fp8_wo", "w_uint4_per_group_asym"):
            model = quantize(build(), name)
            path = export(model)
            for dtype in (torch.float16, torch.bfloat16):
                found = load(path, dtype=dtype)
                assert logits(found).dtype == dtype
                off = (logits(found).float() - logits(model)).norm() / logits(model).norm()
                assert off < 0.1, (name, dtype)

    def test_shards(self, build, quantize, tmp_path, logits, load):
        model = quantize(build("opt"), "int8")
        ModelExporter(tmp_path / "x").export_safetensors_model(model, max_shard_size="40KB")
        assert len(list((tmp_path / "x").glob("*.safetensors"))) > 2
        assert torch.equal(logits(load(tmp_path / "x")), logits(model))

    def test_placed_by_accelerate_and_exported_again(self, build, quantize, export, logits, load):
        model = quantize(build("tied"), "int8")
        first = export(model)
        found = load(first, device_map={"": "cpu"})
        assert torch.equal(logits(found), logits(model))
        second = export(found)
        for file in first.iterdir():
            assert (second / file.name).read_bytes() == file.read_bytes()

    def test_generation(self, build, quantize, export, load, config_of):
        config = with_kv_cache(config_of("int8"), CACHE, "int8_per_tensor_static")
        model = quantize(build(), config)
        found = load(export(model))
        prompt = torch.tensor([[5, 9, 17]])
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        tokens = found.generate(prompt, **options)
        assert tokens.shape == (1, 11) and torch.equal(tokens, model.generate(prompt, **options))
        assert isinstance(found.model.layers[0].self_attn.q_proj, QParamsLinear)

    def test_what_transformers_asserts_of_quark(self, build, quantize, export, load):
        """The assertions of its tests of Quark, on a model of int8 made here, in float16.

        Source: ``tests/quantization/quark_integration/test_quark.py`` of Transformers.
        """
        from transformers import AutoConfig, QuarkConfig
        from transformers.utils.import_utils import is_quark_available

        from quark.torch.export.nn.modules.qparamslinear import QParamsLinear as Imported

        assert is_quark_available()
        wide = {"hidden_size": 128, "intermediate_size": 512}
        model = build(dtype=torch.float16, **wide)
        memory = model.get_memory_footprint()
        quantize(model, "int8")
        path = export(model)
        QuarkConfig(**AutoConfig.from_pretrained(path).quantization_config)
        found = load(path, dtype=torch.float16)
        assert memory / found.get_memory_footprint() > 1.66
        with pytest.raises(ValueError):
            found.to(torch.float16)
        assert found.dtype == torch.float16  # they ask for a field that Transformers no longer sets
        assert isinstance(found.model.layers[0].mlp.gate_proj, Imported)
        options = {"max_new_tokens": 15, "min_new_tokens": 15, "num_beams": 1, "do_sample": False}
        tokens = found.generate(torch.tensor([[5, 9, 17]]), use_cache=True, **options)
        assert torch.equal(tokens, model.generate(torch.tensor([[5, 9, 17]]), **options))

    def test_the_quantizer_is_ours(self, build, quantize, export, load):
        found = load(export(quantize(build(), "int8")))
        config = found.config.quantization_config
        assert config.quant_method == "quark" and not config.legacy
        assert isinstance(config.quant_config, Config)


# A scheme of each kind.
SOME = [
    "int8",
    "ptpc_int8",
    "w_uint8_a_uint8_per_tensor_asym",
    "w_uint4_per_group_asym",
    "uint4_wo_per_channel",
    "int3_wo_per_channel",
    "int2_wo_32",
    "w_fp8_a_fp8_o_fp8",
    "bfloat16",
    "float16",
]


class TestCache:
    @pytest.mark.parametrize("weight_format", FORMATS)
    @pytest.mark.parametrize("min_kv_scale", [0.0, 1.0])
    @pytest.mark.parametrize("cache", ["fp8", "int8_per_tensor_static", "fp8_dynamic"])
    @pytest.mark.parametrize("name", ["fp8", "w_uint4_per_group_asym"])
    @pytest.mark.sampled(3, covers=True)
    def test_frozen_and_reloaded_agree(
        self,
        build,
        quantize,
        export,
        config_of,
        logits,
        load,
        name,
        cache,
        min_kv_scale,
        weight_format,
    ):
        config = with_kv_cache(config_of(name), CACHE, cache, min_kv_scale)
        model = quantize(build(), config)
        path = export(model, weight_format=weight_format)
        assert torch.equal(logits(load(path)), logits(model))
        stored = load_file(path / "model.safetensors")
        for i in range(2):
            keys = [f"model.layers.{i}.self_attn.{p}_proj.output_scale" for p in "kv"]
            if cache == "fp8_dynamic":
                assert not set(keys) & set(stored)
                continue
            key, value = (stored[k] for k in keys)
            assert key.shape == () and torch.equal(key, value) and key >= min_kv_scale
            assert (key == min_kv_scale) == (min_kv_scale > 0)

    def test_a_cache_of_excluded_layers(self, build, quantize, export, config_of, logits, load):
        config = with_kv_cache(config_of("fp8", ["lm_head", "*self_attn*"]), CACHE, "fp8")
        config.layer_quant_config = {}
        model = quantize(build(), config)
        found = load(export(model))
        attention = found.model.layers[0].self_attn
        assert type(attention.q_proj) is torch.nn.Linear
        assert attention.k_proj.weight.dtype == torch.float32
        assert attention.k_proj.output_quantizer is not None
        assert torch.equal(logits(found), logits(model))

    def test_groups_named_in_the_export_alone(self, build, quantize, tmp_path, logits, load):
        """The merge comes after freezing, so the checkpoint has other scales; it loads whole."""
        fp8 = FP8E4M3PerTensorSpec().to_quantization_spec()
        layer = QuantizationConfig(weight=INT8, output_tensors=fp8)
        config = Config(scheme("int8_wo"), layer_quant_config=dict.fromkeys(CACHE, layer))
        model = quantize(build(), config)
        options = ExporterConfig(JsonExporterConfig(kv_cache_group=CACHE))
        ModelExporter(options, tmp_path / "x").export_safetensors_model(model)
        found = load(tmp_path / "x")
        for mine, other in zip(model.model.layers, found.model.layers, strict=True):
            own = [getattr(mine.self_attn, p).output_quantizer.scale for p in ("k_proj", "v_proj")]
            for name in ("k_proj", "v_proj"):
                assert getattr(other.self_attn, name).output_quantizer.scale == max(own)


class TestPatternsThatOverlap:
    """Transformers sorts the keys of config.json; the first match must still be the same."""

    CONFIGS = {  # noqa: RUF012
        "wildcards": {"*down_proj": "int8_wo", "*.layers.0.*": "w_uint4_per_group_asym"},
        "wildcard_before_name": {
            "model.layers.1.mlp.*": "fp8_wo",
            "*.layers.1.*": "int8",
            "*": "w_uint4_per_group_asym",
        },
        "sorted_already": {"*.layers.0.*": "w_uint4_per_group_asym", "*down_proj": "int8_wo"},
    }

    @pytest.mark.parametrize("patterns", CONFIGS.values(), ids=CONFIGS)
    def test_the_first_still_wins(self, build, quantize, export, config_of, logits, load, patterns):
        layers = {pattern: scheme(name, 32) for pattern, name in patterns.items()}
        model = quantize(build(), config_of("int8", layer_quant_config=layers))
        expected = {
            name: (module.quant_config.weight.dtype, module.quant_config.weight.qscheme)
            for name, module in model.named_modules()
            if hasattr(module, "frozen")
        }
        assert len(set(expected.values())) >= 2
        path = export(model)
        section = json.loads((path / "config.json").read_text())["quantization_config"]
        assert list(section["layer_quant_config"]) == sorted(section["layer_quant_config"])
        found = load(path)
        assert {
            name: (module.quant_config.weight.dtype, module.quant_config.weight.qscheme)
            for name, module in found.named_modules()
            if isinstance(module, PackedLayer)
        } == expected
        assert torch.equal(logits(found), logits(model))

    def test_order_matters_in_these(self, build, config_of):
        """The control: sorted, the patterns of the first case choose otherwise."""
        from quark.torch.quantization.preparation import select_layers

        patterns = self.CONFIGS["wildcards"]
        both = [
            select_layers(
                build(), config_of("int8", layer_quant_config={p: scheme(n, 32) for p, n in order})
            )
            for order in (list(patterns.items()), sorted(patterns.items()))
        ]
        assert both[0] != both[1]


ARCHITECTURES = {
    "qwen2": {},  # biases of q, k, v alone
    "phi3": {"pad_token_id": 0},  # fused qkv and gate_up
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},  # tied, scaled embedding
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # fused experts, renamed
    "gpt_neox": {"num_key_value_heads": None},  # renamed head
    "bloom": {"n_head": 4, "n_layer": 2},
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_architectures(build, quantize, export, config_of, logits, load, kind):
    model = quantize(build(kind, **ARCHITECTURES[kind]), config_of("int8", []))
    assert torch.equal(logits(load(export(model))), logits(model))
