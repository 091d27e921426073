"""The native format of Quark: config.json and model_state_dict.pth."""

from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("pack_method", ["reorder", "order"])
def test_export_and_import(llama_dir, tmp_path, logits, weight_format, pack_method):
    from transformers import AutoConfig, AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelQuantizer

    args = SimpleNamespace(
        output_dir=str(tmp_path / "exported_model_dir"),
        import_model_dir=str(tmp_path / "exported_model_dir"),
        custom_mode="quark",
    )
    model = AutoModelForCausalLM.from_pretrained(llama_dir)
    quant_config = LLMTemplate.get("llama").get_config(scheme="uint4_wo_32")
    model = ModelQuantizer(quant_config).quantize_model(model)
    model = ModelQuantizer.freeze(model)
    frozen = logits(model)

    from quark.torch.export.api import ModelExporter
    from quark.torch.export.config.config import ExporterConfig, JsonExporterConfig

    json_export_config = JsonExporterConfig(weight_format=weight_format, pack_method=pack_method)
    export_config = ExporterConfig(json_export_config=json_export_config)

    exporter = ModelExporter(config=export_config, export_dir=args.output_dir)
    exporter.export_quark_model(model, quant_config=quant_config, custom_mode=args.custom_mode)

    names = sorted(p.name for p in (tmp_path / "exported_model_dir").iterdir())
    assert names == ["SHA256SUMS", "config.json", "generation_config.json", "model_state_dict.pth"]
    state = torch.load(tmp_path / "exported_model_dir/model_state_dict.pth", weights_only=True)
    weight = state["model.layers.0.self_attn.q_proj.weight"]
    if weight_format == "real_quantized":
        assert weight.dtype == torch.int32 and weight.shape == (64, 8)
    else:
        assert weight.dtype == torch.float32 and weight.shape == (64, 64)

    from quark.torch import ModelImporter

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama_dir))
    importer = ModelImporter(model_info_dir=args.import_model_dir)
    model = importer.import_model_info(model)
    assert torch.equal(logits(model), frozen)
