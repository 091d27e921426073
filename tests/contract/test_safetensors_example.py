"""Export to and import from the Hugging Face format."""

import json

import torch


def test_export_and_import(opt_dir, tmp_path, monkeypatch, logits):
    monkeypatch.chdir(tmp_path)
    from transformers import AutoModelForCausalLM

    from quark.torch.export.api import ModelExporter
    from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig
    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.config import (
        Config,
        Int8PerTensorSpec,
        QuantizationConfig,
    )

    quant_spec = Int8PerTensorSpec(
        observer_method="min_max",
        symmetric=True,
        scale_type="float",
        round_method="half_even",
        is_dynamic=False,
    ).to_quantization_spec()

    global_quant_config = QuantizationConfig(weight=quant_spec)
    quant_config = Config(global_quant_config=global_quant_config)

    export_config = ExporterConfig(
        json_export_config=JsonExporterConfig(weight_format="real_quantized")
    )

    model = AutoModelForCausalLM.from_pretrained(opt_dir)

    quantizer = ModelQuantizer(quant_config)
    quantized_model = quantizer.quantize_model(model, dataloader=None)
    quantized_model = quantizer.freeze(quantized_model)
    frozen = logits(quantized_model)

    model_exporter = ModelExporter(config=export_config, export_dir="./opt-125m-quantized")
    model_exporter.export_safetensors_model(model=quantized_model, quant_config=quant_config)

    written = sorted(p.name for p in (tmp_path / "opt-125m-quantized").iterdir())
    assert written == ["SHA256SUMS", "config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((tmp_path / "opt-125m-quantized" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quark"
    # lm_head is not excluded here, so it is quantized and no longer tied to the embedding.
    assert config["tie_word_embeddings"] is False

    from transformers import AutoConfig

    from quark.torch.export.api import ModelImporter

    model_importer = ModelImporter(
        model_info_dir="./opt-125m-quantized", saved_format="safetensors"
    )

    # We only need the backbone/architecture of the original model,
    # not its weights, as weights are loaded from the quantized checkpoint.
    config = AutoConfig.from_pretrained(opt_dir)
    with torch.device("meta"):
        original_model = AutoModelForCausalLM.from_config(config)

    quantized_model = model_importer.import_model_info(original_model)
    assert torch.equal(logits(quantized_model), frozen)

    # and through Transformers alone
    model = AutoModelForCausalLM.from_pretrained("./opt-125m-quantized", device_map="auto")
    assert torch.equal(logits(model), frozen)
    layer = model.model.decoder.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "QParamsLinear"
    assert "(weight_quantizer)" in repr(layer)
