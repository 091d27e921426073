"""``quark quantize`` of a model that is quantized already: dequantized, and quantized again."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelQuantizer, import_model_from_safetensors
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.packed import PackedLayer

INT4 = ("--quant_scheme", "int4_wo_32")


@pytest.fixture
def source(quantize):
    """A checkpoint in fp8 per tensor, as another tool would read it."""
    path, _ = quantize("--quant_scheme", "fp8", "--custom_mode", "fp8")
    return path


@pytest.mark.parametrize("algorithm", [(), ("--quant_algo", "gptq")])
def test_another_scheme(quantize, source, algorithm):
    path, printed = quantize(*INT4, *algorithm, model=source)
    assert "fp8_e4m3 per tensor, dequantized to float32" in printed
    model = load_checkpoint(path)
    assert model.model.layers[0].mlp.up_proj.quant_config.weight.fmt.bits == 4
    origin, name = load_in_float(source), "model.layers.0.mlp.up_proj.weight"
    before, after = (m.state_dict()[name] for m in (origin, load_in_float(path)))
    assert 0 < (after - before).norm() / before.norm() < 0.2
    if not algorithm:
        expected = ModelQuantizer(Config(scheme("int4_wo_32"), exclude=["lm_head"]))
        again = ModelQuantizer.freeze(expected.quantize_model(origin))
        assert torch.equal(after, again.state_dict()[name])


@pytest.mark.parametrize("kind", ["model_dir", "mixtral_dir"])
def test_from_files_to_files(kind, request, quantize):
    """The files are those of a model in memory, and of one that is read in parts."""
    first, _ = quantize("--quant_scheme", "int8_wo", model=request.getfixturevalue(kind))
    files, printed = quantize(*INT4, "--quant_flow", "file2file", model=first)
    assert "int8 per channel sym, dequantized to float32" in printed
    bounded = ("--data_type", "float32", "--max_memory", "4GB")  # a type keeps it from files
    for flags in (bounded, bounded[:2]):
        other, _ = quantize(*INT4, *flags, model=first)
        assert other != files and contents(other) == contents(files)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_plan(quark, quantize, source, text, tmp_path, monkeypatch):
    """It is made from headers alone; the run stays below it, and says so."""
    place = ("--model_dir", source, "--output_dir", tmp_path / "out", "--dataset", text)
    flags = (*place, "--skip_evaluation", *INT4, "--quant_algo", "gptq")
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointReader, "tensor", None)
        result = quark("quantize", *flags, "--plan", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    entries = CheckpointReader(source).entries
    assert plan["read"] == sum(entry.nbytes for entry in entries.values())
    assert sum(layer["number"] for layer in plan["layers"] if layer["config"]) == 7 * 2
    path, printed = quantize(*INT4, model=source)
    assert re.search(r"memory .*\(planned .*B\)", printed)
    size = sum(entry.nbytes for entry in CheckpointReader(path).entries.values())
    assert plan["output"] == size


LEFT = (*INT4, "--exclude_layers", "lm_head", "*.0.*")


def test_layers_that_the_configuration_leaves_are_written_dequantized_if_asked_for(
    quantize, source
):
    path, printed = quantize(*LEFT, "--no_keep_prequantized_layers", model=source)
    assert "stored as floats: --no_keep_prequantized_layers" in " ".join(printed.split())
    stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    codes = load_file(source / "model.safetensors")
    product = codes[name].float() * codes[name.replace("weight", "weight_scale")]
    assert torch.equal(stored[name], product)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    assert name.removesuffix(".weight") in section["exclude"]


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        ((), True),
        (("--quant_algo", "gptq"), True),
        (("--quant_algo", "gptq", "--max_memory", "4GB"), True),
        (("--quant_algo", "rotation"), False),
        (("--custom_mode", "awq"), False),
        (("--export_weight_format", "fake_quantized"), True),
        (("--verify",), True),
    ],
)
@pytest.mark.sampled(3)
def test_layers_that_the_configuration_leaves_keep_their_codes(
    flags, is_kept, quantize, source, caplog
):
    """Unless an algorithm changes their values, or the format has no place for them."""
    path, printed = quantize(*LEFT, *flags, model=source)
    before, after = load_checkpoint(source), load_checkpoint(path)
    layers = [f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"]
    for name in layers:
        origin, layer = before.get_submodule(name), after.get_submodule(name)
        assert isinstance(layer, PackedLayer) == is_kept
        assert not is_kept or torch.equal(layer.value("weight"), origin.value("weight"))
    if is_kept and "fake_quantized" not in flags:
        codes, stored = (load_file(p / "model.safetensors") for p in (source, path))
        for name in layers:
            assert torch.equal(*(x[f"{name}.weight"].view(torch.uint8) for x in (stored, codes)))
    changed = "have been changed" in caplog.text
    assert changed == ("rotation" in flags)
    words = "with the codes and scales of the source" if "awq" not in flags else "awq does not hold"
    assert words in " ".join(printed.split())


def test_the_plan_tells_of_kept_layers(quark, quantize, source, text, tmp_path):
    flags = (*LEFT, "--dataset", text, "--skip_evaluation")
    place = ("--model_dir", source, "--output_dir", tmp_path / "none")
    result = quark("quantize", *place, *flags, "--plan", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert sum(layer["number"] for layer in plan["layers"] if layer["is_kept"]) == 7
    path, _ = quantize(*LEFT, model=source)
    size = sum(entry.nbytes for entry in CheckpointReader(path).entries.values())
    assert plan["output"] == size


def test_a_mixture_of_experts(quantize, mixtral_dir):
    source, _ = quantize("--quant_scheme", "int8_wo", model=mixtral_dir)
    path, printed = quantize("--quant_scheme", "fp8", model=source)
    assert "int8 per channel sym, dequantized to float32" in printed
    assert load_checkpoint(path).quant_config.global_quant_config.weight.fmt.is_float


@pytest.mark.parametrize(
    ("scheme", "stored"),
    [
        (INT4, "int4 per group 32 sym, 5.12 bits per weight"),  # 4, and a scale for each group
        (("--quant_scheme", "int8_wo"), "int8 per channel sym, 9.12 bits per weight"),
    ],
)
def test_a_second_loss_is_warned_of_before_the_work(scheme, stored, quark, quantize, tmp_path):
    source, first = quantize(*scheme)
    assert "already" not in first
    flags = ("--model_dir", source, "--output_dir", tmp_path / "again", *INT4)
    result = quark("quantize", *flags, "--plan")
    assert result.exit_code == 0, result.output
    assert f"The model is quantized already ({stored}" in result.stderr
    assert "Give the original model if you have it." in result.stderr


def test_other_methods_are_refused(refused, model_dir, tmp_path):
    path = shutil.copytree(model_dir, tmp_path / "hqq")
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "hqq"}
    (path / "config.json").write_text(json.dumps(described))
    message = refused("quantize", "--model_dir", path, *INT4)
    assert "quant_method='hqq' is unknown" in message
    assert "Give the float model" in message


def test_statistics_and_search(quark, source, text, tmp_path):
    flags = ("--model_dir", source, "--dataset", text, "--num_calib_data", 2, "--seq_len", 16)
    result = quark("collect", *flags, "--output_dir", tmp_path / "statistics", "--probes", 2)
    assert result.exit_code == 0, result.output
    flags = (*flags[:2], "--statistics", tmp_path / "statistics", "--formats", "int4_wo_32,int8_wo")
    result = quark("search", *flags, "--target_bits", 6, "--output", tmp_path / "mixed.json")
    assert result.exit_code == 0, result.output


def test_a_model_in_memory(source, model_dir):
    from transformers import AutoModelForCausalLM

    config = Config(scheme("int8_wo"), exclude=["lm_head"])
    packed = import_model_from_safetensors(None, source)
    with pytest.raises(ValueError, match="dequantize=True"):
        ModelQuantizer(config).quantize_model(packed)
    model = import_model_from_safetensors(None, source, dequantize=True)
    assert ModelQuantizer(config).quantize_model(model) is model
    with pytest.raises(ValueError, match="give None for model"):
        import_model_from_safetensors(model, source, dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(model_dir)
    theirs.hf_quantizer = object()  # set by Transformers where it quantized a model
    with pytest.raises(ValueError, match=r"Transformers loaded this model quantized: .*dequantize"):
        ModelQuantizer(config).quantize_model(theirs)
