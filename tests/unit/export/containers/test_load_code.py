"""The hint after an export names a loader that works here: each hint is run."""

from importlib import import_module

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from quark.torch.export.containers.base import ExportSettings, get_container
from quark.torch.export.conversion import convert
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import recognize_container
from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.unit.quantization.nn.caches import config_of

IDS = torch.arange(20).reshape(2, 10)
# Schemes of formats without integers.
OTHERS = {"fp8": "fp8", "modelopt": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4_weight_only"}
KINDS = [("hf_format", mode) for mode in FORMATS]
KINDS += [("quark_format", "quark"), ("gguf", "quark")]


@pytest.fixture(scope="module")
def models(build, quantize):
    """Small models by the name of their scheme."""
    made = {}

    def models(name):
        config, kind = Config(scheme(name, 32), exclude=["lm_head"]), "llama"
        if name == "mxfp4_weight_only":  # of experts alone
            config, kind = Config(layer_quant_config={"*.experts.*": scheme(name)}), "gpt_oss"
        if name not in made:
            sizes = {"num_hidden_layers": 1, "vocab_size": 2048}
            sizes |= {"num_local_experts": 4} if kind == "gpt_oss" else {}
            made[name] = quantize(build(kind, **sizes), config)
        return made[name]

    return models


def run(line):
    """Run a hint with the packages that it names; return what it loads."""
    package = line.split("= ")[1].split(".")[0]
    names = {package: import_module(package)}
    import_module("quark.torch")
    exec(line, names)
    return names[line.split(" = ")[0]]


@pytest.mark.parametrize(("container", "mode"), KINDS)
@pytest.mark.sampled(3)
def test_hints_load_the_model(models, tmp_path, container, mode):
    if container == "gguf":
        pytest.importorskip("gguf")
    model = models(OTHERS.get(mode, "uint4_wo_32"))
    settings = ExportSettings(custom_mode=mode, tokenizer_path=model_directory())
    ModelExporter(tmp_path / "out").export(container, model, settings)
    loaded = run(get_container(container).load_code(tmp_path / "out"))
    with torch.no_grad():
        expected, actual = model(IDS).logits, loaded(IDS).logits
    # Scales in GGUF, AWQ and GPTQ have 16 bits.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02 * float(expected.std()))


def test_commands_of_servers(models, tmp_path, quantize):
    from transformers import BertConfig, BertModel

    model = models("uint4_wo_32")
    for container in ("hf_format", "gguf", "quark_format"):
        settings = ExportSettings(tokenizer_path=model_directory())
        ModelExporter(tmp_path / container).export(container, model, settings)
    ModelExporter(tmp_path / "mlx").export_safetensors_model(model, custom_mode="mlx")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    encoder = BertModel(BertConfig(**sizes, num_attention_heads=2, vocab_size=64)).eval()
    ModelExporter(tmp_path / "bert").export_safetensors_model(quantize(encoder, "int8_wo"))
    commands = {
        name: recognize_container(tmp_path / name).serve_command(tmp_path / name)
        for name in ("hf_format", "gguf", "quark_format", "mlx", "bert")
    }
    assert commands == {
        "hf_format": f"vllm serve {tmp_path}/hf_format",
        "gguf": f"llama-cli -m {tmp_path}/gguf/model.gguf",
        **dict.fromkeys(["quark_format", "mlx", "bert"]),
    }


@pytest.mark.parametrize("name", ["int3_wo_32", "int4_wo_per_channel", "int8_wo"])
def test_vllm_reads_more_from_another_layout(models, tmp_path, name):
    place = tmp_path / "出 力"
    ModelExporter(place).export_safetensors_model(models(name))
    line, serve = get_container("hf_format").serve_command(place).splitlines()
    assert line == f"quark convert '{place}' '{place}-ct' --to compressed-tensors"
    assert serve == f"vllm serve '{place}-ct'"
    convert(place, f"{place}-ct", "compressed-tensors")
    other = get_container("hf_format").serve_command(tmp_path / "出 力-ct")
    assert other == serve


@pytest.mark.parametrize("prescales", [False, True])
def test_vllm_rotates_inputs_in_another_layout(build, quantize, tmp_path, prescales):
    online = OnlineRotationConfig(
        online_rotation_layers=["*down_proj"], use_input_prescale=prescales
    )
    options = RotationConfig(r1=False, rotation_size=32, online_config=online)
    config = Config(scheme("ptpc_int8"), exclude=["lm_head"], algo_config=[options])
    model = quantize(build("llama"), config)
    place = tmp_path / "rotated"
    ModelExporter(place).export_safetensors_model(model)
    command = get_container("hf_format").serve_command(place)
    if prescales:  # no other layout holds the factors
        assert command is None
        return
    convert_line, serve = command.splitlines()
    assert convert_line == f"quark convert {place} {place}-ct --to compressed-tensors"
    convert(place, f"{place}-ct", "compressed-tensors")
    other = tmp_path / "rotated-ct"
    assert "transform_config" in (other / "config.json").read_text("utf-8")
    assert get_container("hf_format").serve_command(other) == serve == f"vllm serve {other}"


@pytest.mark.parametrize(("name", "options"), [("phi3", {"pad_token_id": 0}), ("llama", {})])
def test_a_cache_of_one_projection_has_no_command(build, quantize, tmp_path, name, options):
    """vLLM and compressed-tensors have scales of keys and of values."""
    pattern = "*qkv_proj" if name == "phi3" else "*[kv]_proj"
    config = config_of(layer=scheme("fp8"), patterns=[pattern])
    ModelExporter(tmp_path).export_safetensors_model(quantize(build(name, **options), config))
    command = get_container("hf_format").serve_command(tmp_path)
    assert (command is None) == (name == "phi3")


def test_no_command_where_vllm_has_no_scheme(models, tmp_path):
    ModelExporter(tmp_path / "mx9").export_safetensors_model(models("mx9"))
    assert get_container("hf_format").serve_command(tmp_path / "mx9") is None


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
def test_no_command_for_models_with_conv1d(kind, tmp_path, quantize):
    config = AutoConfig.for_model(kind, n_embd=64, n_layer=1, n_head=2, vocab_size=64)
    model = quantize(AutoModelForCausalLM.from_config(config).eval(), "int4_wo_32")
    ModelExporter(tmp_path / "out").export_safetensors_model(model)
    assert get_container("hf_format").serve_command(tmp_path / "out") is None


def test_fp8_is_loaded_by_this_package(models, tmp_path):
    ModelExporter(tmp_path / "模型").export_safetensors_model(models("fp8"), custom_mode="fp8")
    line = get_container("hf_format").load_code(tmp_path / "模型")
    assert line == f'model = quark.torch.import_model_from_safetensors(None, "{tmp_path}/模型")'


def test_the_class_of_other_models(tmp_path, quantize):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=2, vocab_size=64)
    model = BertForSequenceClassification(config).eval()
    quantize(model, "int8_wo")
    ModelExporter(tmp_path / "out").export_safetensors_model(model)
    line = get_container("hf_format").load_code(tmp_path / "out")
    assert "transformers.BertForSequenceClassification.from_pretrained" in line
    with torch.no_grad():
        assert torch.equal(run(line)(IDS).logits, model(IDS).logits)


@pytest.mark.nightly
def test_onnx(models, tmp_path):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    ModelExporter(tmp_path / "out").export_onnx_model(models("uint4_wo_32"), (IDS,))
    session = run(get_container("onnx").load_code(tmp_path / "out"))
    assert [value.name for value in session.get_inputs()] == ["input_ids"]
