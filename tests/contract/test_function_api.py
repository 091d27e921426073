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


def test_options_without_effect_warn(llama_dir, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    from quark.torch import (
        LLMTemplate,
        ModelQuantizer,
        RuntimeOptions,
        export_safetensors,
        import_model_from_safetensors,
    )

    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    config = LLMTemplate.get("llama").get_config(scheme="int8_wo")
    model = ModelQuantizer(config).quantize_model(model)
    caplog.clear()
    model = ModelQuantizer.freeze(model, runtime_options=RuntimeOptions())
    assert "runtime_options has no effect" in caplog.text
    export_safetensors(model, tmp_path / "out")
    import_model_from_safetensors(None, tmp_path / "out", device="cpu", multi_gpu="auto")
    assert "multi_gpu='auto' has no effect: the model lies on one device" in caplog.text


def test_other_operators_than_those_of_onnx_are_refused(tmp_path):
    import pytest

    from quark.torch import ModelExporter, export_onnx

    kinds = torch.onnx.OperatorExportTypes
    arguments = (torch.nn.Linear(1, 1), torch.zeros(1, 1))
    for export in (
        lambda kind: export_onnx(arguments[0], tmp_path / "out", (), operator_export_type=kind),
        lambda kind: ModelExporter(tmp_path / "out").export_onnx_model(
            *arguments, operator_export_type=kind
        ),
    ):
        with pytest.raises(ValueError, match=r"ONNX_ATEN: only operators of ONNX are written"):
            export(kinds.ONNX_ATEN)
        with pytest.raises(ValueError, match="has no quantized module"):
            export(kinds.ONNX)
