"""The basic example: int8, symmetric, per tensor, weight only, every field spelled out."""

import logging

import pytest
import torch


def test_basic_example(opt_dir, logits, caplog):
    # 1. Set model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(opt_dir)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(opt_dir)
    before = logits(model)
    weight = model.model.decoder.layers[0].fc1.weight.detach().clone()

    # 2. Set quantization configuration
    from quark.torch.quantization.config.config import (
        Config,
        QuantizationConfig,
        QuantizationSpec,
    )
    from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
    from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver

    DEFAULT_INT8_PER_TENSOR_SYM_SPEC = QuantizationSpec(
        dtype=Dtype.int8,
        qscheme=QSchemeType.per_tensor,
        observer_cls=PerTensorMinMaxObserver,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
    )

    DEFAULT_W_INT8_PER_TENSOR_CONFIG = QuantizationConfig(weight=DEFAULT_INT8_PER_TENSOR_SYM_SPEC)
    quant_config = Config(global_quant_config=DEFAULT_W_INT8_PER_TENSOR_CONFIG)

    # 3. Define calibration dataloader (still need this step for weight only and dynamic
    # quantization)
    from torch.utils.data import DataLoader

    text = "Hello, how are you?"
    tokenized_outputs = tokenizer(text, return_tensors="pt")
    calib_dataloader = DataLoader(tokenized_outputs["input_ids"])

    # 4. In-place replacement with quantized modules in model
    from quark.torch import ModelQuantizer

    quantizer = ModelQuantizer(quant_config)
    with caplog.at_level(logging.INFO, logger="quark"):
        quant_model = quantizer.quantize_model(model, calib_dataloader)
    assert "Model quantization has been completed." in caplog.text
    assert quant_model is model

    # 5. Freeze
    freezed_quantized_model = quantizer.freeze(quant_model)

    layer = freezed_quantized_model.model.decoder.layers[0].fc1
    scale = weight.abs().max() / 127.5
    expected = torch.fake_quantize_per_tensor_affine(weight, scale.item(), 0, -128, 127)
    assert torch.equal(layer.weight, expected)
    after = logits(freezed_quantized_model)
    assert not torch.equal(after, before)
    assert (after - before).abs().mean() < 0.1 * before.abs().mean()


def test_model_exporter_takes_a_directory_alone(opt_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    from quark.torch import LLMTemplate, ModelExporter, ModelQuantizer

    model = AutoModelForCausalLM.from_pretrained(opt_dir)
    config = LLMTemplate.get("opt").get_config(scheme="w_int8_per_tensor_sym")
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    exporter = ModelExporter(str(tmp_path / "export_path"))
    exporter.export_safetensors_model(model)
    assert (tmp_path / "export_path" / "config.json").is_file()
    with pytest.raises(ValueError, match="export_dir"):
        ModelExporter()
