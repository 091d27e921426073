"""The function API of current versions, thin over the same code."""

import torch


def test_export_and_import_functions(llama_dir, tmp_path, logits):
    from transformers import AutoModelForCausalLM

    from quark.torch import (
        LLMTemplate,
        ModelQuantizer,
        export_safetensors,
        import_model_from_safetensors,
    )

    template = LLMTemplate.get("llama")
    config = template.get_config(scheme="fp8", kv_cache_scheme="fp8")
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    batches = [torch.arange(10).view(1, 10), torch.arange(30).view(2, 15)]
    model = ModelQuantizer(config).quantize_model(model, batches)
    model = ModelQuantizer.freeze(model)
    frozen = logits(model)
    out = tmp_path / "out"
    export_safetensors(model, str(out), custom_mode="quark", weight_format="real_quantized")
    built = import_model_from_safetensors(
        None, str(out), device="cpu", attn_implementation=model.config._attn_implementation
    )
    assert torch.equal(logits(built), frozen)
    given = AutoModelForCausalLM.from_pretrained(llama_dir)
    assert torch.equal(logits(import_model_from_safetensors(given, str(out))), frozen)


def test_save_and_load_params(llama_dir, tmp_path, logits):
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer, load_params, save_params

    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    config = LLMTemplate.get("llama").get_config(scheme="int4_wo_32")
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    frozen = logits(model)
    for compressed in (False, True):
        out = tmp_path / f"compressed_{compressed}"
        save_params(model, "llama", export_dir=str(out), compressed=compressed)
        files = {"json_path": out / "llama.json", "safetensors_path": out / "llama.safetensors"}
        loaded = load_params(
            AutoModelForCausalLM.from_pretrained(llama_dir), **files, compressed=compressed
        )
        assert torch.equal(logits(loaded), frozen)


def test_both_spellings_are_one_class():
    from quark.torch.quantization import config

    names = config.config
    assert names.Config is names.QConfig
    assert names.QuantizationConfig is names.QLayerConfig
    assert names.QuantizationSpec is names.QTensorConfig
