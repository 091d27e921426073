"""FP8 weights, activations and key-value cache, exported with the tokenizer."""

import json

import pytest
import torch
from safetensors import safe_open

AUTOSMOOTHQUANT = {
    "name": "autosmoothquant",
    "model_decoder_layers": "model.layers",
    "compute_scale_loss": "MAE",
    "scaling_layers": [
        {
            "prev_op": "input_layernorm",
            "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "inp": "self_attn.q_proj",
            "module2inspect": "self_attn",
        },
        {
            "prev_op": "self_attn.v_proj",
            "layers": ["self_attn.o_proj"],
            "inp": "self_attn.o_proj",
        },
        {
            "prev_op": "post_attention_layernorm",
            "layers": ["mlp.gate_proj", "mlp.up_proj"],
            "inp": "mlp.gate_proj",
            "module2inspect": "mlp",
        },
        {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
    ],
}


@pytest.mark.parametrize(
    "algorithm",
    [None, [], {"name": "autosmoothquant"}, AUTOSMOOTHQUANT],
    ids=["no algorithm", "empty list", "autosmoothquant", "autosmoothquant with layers"],
)
def test_fp8_with_kv_cache(llama_dir, tmp_path, monkeypatch, logits, algorithm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_autosmoothquant_config.json").write_text(json.dumps(algorithm))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    MODEL_ID = str(llama_dir)
    model = AutoModelForCausalLM.from_pretrained(MODEL_ID, device_map="auto", dtype="auto")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_ID, model_max_length=64, padding_side="left")

    from torch.utils.data import DataLoader

    BATCH_SIZE = 1
    NUM_CALIBRATION_DATA = 8
    MAX_SEQUENCE_LENGTH = 16
    text_data = [f"Line {i} says that calibration needs some text." for i in range(8)]
    tokenized_outputs = tokenizer(
        text_data[:NUM_CALIBRATION_DATA],
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=MAX_SEQUENCE_LENGTH,
    )
    calib_dataloader = DataLoader(
        tokenized_outputs["input_ids"], batch_size=BATCH_SIZE, drop_last=True
    )

    from quark.torch.quantization import (
        Config,
        FP8E4M3PerTensorSpec,
        QuantizationConfig,
        load_quant_algo_config_from_file,
    )

    FP8_PER_TENSOR_SPEC = FP8E4M3PerTensorSpec(
        observer_method="min_max", is_dynamic=False
    ).to_quantization_spec()
    global_quant_config = QuantizationConfig(
        input_tensors=FP8_PER_TENSOR_SPEC, weight=FP8_PER_TENSOR_SPEC
    )
    KV_CACHE_SPEC = FP8_PER_TENSOR_SPEC
    kv_cache_layer_names_for_llama = ["*k_proj", "*v_proj"]
    kv_cache_quant_config = {
        name: QuantizationConfig(
            input_tensors=global_quant_config.input_tensors,
            weight=global_quant_config.weight,
            output_tensors=KV_CACHE_SPEC,
        )
        for name in kv_cache_layer_names_for_llama
    }
    layer_quant_config = kv_cache_quant_config.copy()
    LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE = "./llama_autosmoothquant_config.json"
    algo_config = algorithm
    if algorithm:
        algo_config = load_quant_algo_config_from_file(LLAMA_AUTOSMOOTHQUANT_CONFIG_FILE)
    EXCLUDE_LAYERS = ["lm_head"]

    quant_config = Config(
        global_quant_config=global_quant_config,
        layer_quant_config=layer_quant_config,
        kv_cache_quant_config=kv_cache_quant_config,
        exclude=EXCLUDE_LAYERS,
        algo_config=algo_config,
    )

    from quark.torch import ModelExporter, ModelQuantizer
    from quark.torch.export import ExporterConfig, JsonExporterConfig

    quantizer = ModelQuantizer(quant_config)
    gains = model.model.layers[0].input_layernorm.weight.detach().clone()
    quantizer.quantize_model(model, calib_dataloader)
    is_smoothed = not torch.equal(model.model.layers[0].input_layernorm.weight, gains)
    assert is_smoothed == bool(algorithm)
    freezed_model = quantizer.freeze(model)
    frozen = logits(freezed_model)

    LLAMA_KV_CACHE_GROUP = ["*k_proj", "*v_proj"]
    export_config = ExporterConfig(json_export_config=JsonExporterConfig())
    export_config.json_export_config.kv_cache_group = LLAMA_KV_CACHE_GROUP
    EXPORT_DIR = "Llama-2-70b-chat-hf-w-fp8-a-fp8-kvcache-fp8-pertensor"
    exporter = ModelExporter(config=export_config, export_dir=EXPORT_DIR)
    with torch.no_grad():
        exporter.export_safetensors_model(
            freezed_model, quant_config=quant_config, tokenizer=tokenizer
        )

    assert (tmp_path / EXPORT_DIR / "tokenizer.json").is_file()
    with safe_open(tmp_path / EXPORT_DIR / "model.safetensors", "pt") as file:
        block = "model.layers.0.self_attn"
        k, v = (file.get_tensor(f"{block}.{name}_proj.output_scale") for name in "kv")
        assert k.shape == torch.Size([]) and torch.equal(k, v)
        assert file.get_tensor(f"{block}.k_proj.weight").dtype == torch.float8_e4m3fn
        assert f"{block}.q_proj.output_scale" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("lm_head.weight").dtype == torch.float32

    reloaded = AutoModelForCausalLM.from_pretrained(EXPORT_DIR)
    assert torch.equal(logits(reloaded), frozen)
    text = AutoTokenizer.from_pretrained(EXPORT_DIR)("Hello", return_tensors="pt")
    generated = reloaded.generate(**text, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert generated.shape[1] == text["input_ids"].shape[1] + 4


def test_algo_config_may_be_one_config_or_a_list():
    from quark.torch.quantization import AutoSmoothQuantConfig, Config, QuantizationConfig

    one = Config(global_quant_config=QuantizationConfig(), algo_config=AutoSmoothQuantConfig())
    many = Config(global_quant_config=QuantizationConfig(), algo_config=[AutoSmoothQuantConfig()])
    assert one == many and isinstance(one.algo_config, list)
