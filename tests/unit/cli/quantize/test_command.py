"""``quark quantize``: what it refuses, what the flags mean, and what it writes."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from quark.cli import models
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.template import LLMTemplate


def section(path):
    """The quantization_config of a checkpoint."""
    return json.loads((path / "config.json").read_text())["quantization_config"]


def tensors(path):
    return load_file(path / "model.safetensors")


# ------------------------------------------------------------------------------------- flags


def test_documented_spellings(request_of):
    wanted = request_of(
        *("--output_dir", "out", "--quant_scheme", "w_int4_per_group_sym", "--group_size", 64),
        *("--num_calib_data", 7, "--seq_len", 33, "--batch_size", 2, "--kv_cache_dtype", "fp8"),
        *("--min_kv_scale", 0.5, "--data_type", "bfloat16", "--device", "cpu"),
        *("--pack_method", "order", "--export_weight_format", "fake_quantized"),
        *("--model_export", "quark_format", "--weight_matrix_merge", "--skip_evaluation"),
    )
    dashed = request_of(
        *("--output-dir", "out", "--quant-scheme", "w_int4_per_group_sym", "--group-size", 64),
        *("--num-calib-data", 7, "--seq-len", 33, "--batch-size", 2),
        *("--kv-cache-quant-scheme", "fp8"),
        *("--min-kv-scale", 0.5, "--data-type", "bfloat16", "--device", "cpu"),
        *("--pack-method", "order", "--export-weight-format", "fake_quantized"),
        *("--model-export", "quark_format", "--weight-matrix-merge", "--skip-evaluation"),
    )
    assert wanted == dashed
    assert (str(wanted.output_dir), wanted.group_size, wanted.min_kv_scale) == ("out", 64, 0.5)
    assert (wanted.data_type, wanted.kv_cache_dtype) == ("bfloat16", "fp8")
    assert wanted.weight_matrix_merge and wanted.skip_evaluation and not wanted.overwrite


def test_defaults(request_of):
    wanted = request_of("--quant_scheme", "fp8")
    assert str(wanted.output_dir) == "exported_model"
    assert (wanted.pack_method, wanted.exports) == ("reorder", ["hf_format"])
    assert (wanted.excluded, wanted.layer_schemes, wanted.seq_len) == (None, [], None)


@pytest.mark.parametrize(
    ("flags", "excluded"),
    [
        (["--exclude_layers", "a", "*b"], ["a", "*b"]),
        (["--exclude_layers", "a", "--exclude-layers", "b"], ["a", "b"]),
        (["--exclude_layers=a"], ["a"]),
        (["--exclude_layers", "", "--overwrite"], []),
        (["--exclude_layers"], []),
        (["--exclude_layers", "-v"], []),
    ],
    ids=" ".join,
)
def test_excluded_layers(flags, excluded, request_of):
    assert request_of("--quant_scheme", "fp8", *flags).excluded == excluded


def test_schemes_of_layers(request_of):
    flags = ["--layer_quant_scheme", "*.0.*", "fp8", "--layer-quant-scheme", "*up", "int8"]
    wanted = request_of("--quant_scheme", "fp8", *flags)
    assert wanted.layer_schemes == [("*.0.*", "fp8"), ("*up", "int8")]


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give a scheme"),
        (["--quant_scheme", "int4_wo_12x"], "Did you mean 'int4_wo_128'?"),
        (["--quant_scheme", "fp8", "--config", "x.json"], "conflicts with --config: give one"),
        (["--config", "x.json", "--fp8_attention_quant"], "--config sets this"),
        (
            ["--quant_scheme", "fp8", "--fp8_attention_quant", "--attention_scheme", "qkv_fp8"],
            "--attention_scheme: conflicts with --fp8_attention_quant",
        ),
        (["--config", "x.json"], "there is no file x.json"),
        (["--config", "x.json", "--kv_cache_dtype", "fp8"], "--kv_cache_dtype"),
        (["--config", "x.json", "--exclude_layers"], "--exclude_layers"),
        (["--quant_scheme", "fp8", "--kv_cache_dtype", "fp9"], "Did you mean 'fp8'?"),
        (["--quant_scheme", "fp8", "--min_kv_scale", "1"], "only with --kv_cache_dtype"),
        (["--quant_scheme", "fp8", "--group_size", "32"], "fp8 has no groups"),
        (["--quant_scheme", "int4_wo_64", "--group_size", "32"], "fixes their size"),
        (["--quant_scheme", "int4_wo_0"], "'int4_wo_0' is unknown"),
        (["--quant_scheme", "fp8", "--layer_quant_scheme", "a"], "a pattern and a scheme"),
        (["--quant_scheme", "fp8", "--layer_quant_scheme", "a", "fp"], "'fp' is unknown"),
        (["--quant_scheme", "int4_wo_32", "--weight_matrix_merge"], "per-tensor scales"),
        (
            ["--quant_scheme", "fp8", "--skip_evaluation", "--eval_data", "x"],
            "conflicts with --skip",
        ),
        (["--quant_scheme", "fp8", "--data_type", "int7"], "'int7' is unknown. Known: auto"),
        (["--quant_scheme", "fp8", "--num_calib_data", "0"], "--num_calib_data"),
        (["--quant_scheme", "fp8", "--seq_len", "65"], "more than the 64 tokens"),
        (["--quant_scheme", "fp8", "--dataset", "gone.txt"], "no file or directory gone.txt"),
        (["--quant_scheme", "int8_wo", "--eval_data", "gone.txt"], "no file or directory gone"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_the_model_is_loaded(flags, said, refused, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)  # would fail if it were called
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    assert said in refused("quantize", *place, *flags)
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there(refused, model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = ["--quant_scheme", "fp8", "--device", "cuda"]
    assert "no GPU" in refused("quantize", "--model_dir", model_dir, *flags)


def test_places_that_cannot_be(refused, model_dir, tmp_path):
    scheme = ["--quant_scheme", "fp8", "--overwrite"]

    def refuse(model, output, *flags):
        place = ["--model_dir", model, "--output_dir", output]
        return refused("quantize", *place, *(flags or scheme))

    file = tmp_path / "file"
    file.write_text("text")
    assert "there is no directory" in refuse(tmp_path / "gone", tmp_path / "out")
    assert "config.json" in refuse(tmp_path, tmp_path / "out")
    assert "contains the model" in refuse(model_dir, model_dir)
    assert "contains the model" in refuse(model_dir, model_dir.parent)
    assert "is a file" in refuse(model_dir, file)
    assert "nothing can be written" in refuse(model_dir, file / "out")
    assert "--overwrite" in refuse(model_dir, tmp_path, *scheme[:2])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_leaves_nothing(refused, model_dir, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "deep" / "out"]
    message = refused("quantize", *place, "--quant_scheme", "int4_wo_24", "--skip_evaluation")
    assert "groups of 24 do not divide the inputs of model.layers.*.self_attn.q_proj" in message
    assert list(tmp_path.iterdir()) == []


def test_a_cache_without_projections(refused, bert_dir, tmp_path):
    place = ["--model_dir", bert_dir, "--output_dir", tmp_path / "out", "--skip_evaluation"]
    flags = ["--quant_scheme", "int8_wo", "--kv_cache_dtype", "int8_per_token"]
    assert "has no layers that match *k_proj" in refused("quantize", *place, *flags)


# -------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("attention", [["--attention_dtype", "fp8"], ["--fp8_attention_quant"]])
def test_quantized_attention(quantize, attention):
    from quark.torch.export.checkpoint.config_json import read_config_json
    from quark.torch.export.checkpoint.files import CheckpointReader

    flags = ["--quant_scheme", "fp8", "--kv_cache_dtype", "fp8", *attention]
    path, said = quantize(*flags, "--num_calib_data", 2, "--seq_len", 16, evaluated=True)
    assert re.search(r"attention +fp8_e4m3 per tensor static", said)
    section = read_config_json(path)["quantization_config"]
    assert section["softmax_quant_spec"]["dtype"] == "fp8_e4m3"
    assert section["layer_quant_config"]["*q_proj"]["output_tensors"]["dtype"] == "fp8_e4m3"
    names = CheckpointReader(path).entries
    assert "model.layers.0.self_attn.prob_output_scale" in names


def test_queries_keys_and_values(quantize):
    from quark.torch.export.checkpoint.files import CheckpointReader

    flags = ["--quant_scheme", "int8", "--attention_scheme", "qkv_fp8_per_head"]
    path, said = quantize(
        *flags, "--num_calib_data", 2, "--seq_len", 16, "--custom_mode", "compressed-tensors"
    )
    assert re.search(r"queries +fp8_e4m3 per head static", said)
    names = CheckpointReader(path).entries
    assert "model.layers.0.self_attn.q_scale" in names


def test_what_is_written_and_said(quantize, model_dir, text):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.evaluation.documents import load_documents
    from quark.torch.evaluation.perplexity import perplexity, token_windows

    path, said = quantize("--quant_scheme", "w_uint4_per_group_asym", *GROUPS, evaluated=True)
    assert "uint4 per group 32 asym" in said
    assert "14 quantized, 1 in float" in said
    assert re.search(r"bits per weight +5.12", said)  # 4, and 32 + 4 for 32 weights
    assert re.search(r"size on disk .* → .* \(\d+ %\)", said)
    line = re.search(r"transformers\.(AutoModelForCausalLM.*\))", said)[1]
    model = eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM})
    tokenizer = AutoTokenizer.from_pretrained(path)
    windows = token_windows(load_documents(text), tokenizer, 64, 2)
    original = AutoModelForCausalLM.from_pretrained(model_dir)
    before, after = (f"{perplexity(m, windows):.2f}" for m in (original, model))
    assert f"{before} → {after} (" in said


@pytest.mark.parametrize(("scheme", "tokens"), [("int8", 2 * 3 * 16 / 4), ("int8_wo", None)])
def test_experts(quantize, mixtral_dir, scheme, tokens):
    flags = ["--quant_scheme", scheme, "--num_calib_data", 3, "--seq_len", 16]
    _, said = quantize(*flags, model=mixtral_dir)
    assert "32 quantized, 1 in float" in said  # 4 of attention and 12 of experts a layer
    found = re.search(r"tokens per expert +(\d+) at least, median (\S+)", said)
    assert (found is None) is (tokens is None)
    if found:  # two experts for each token
        assert int(found[1]) <= tokens and float(found[2]) == pytest.approx(tokens, rel=0.5)


GROUPS = ["--group_size", 32]


def test_the_head_is_found_whatever_its_name(quantize, bert_dir):
    path, _ = quantize("--quant_scheme", "int8_wo", model=bert_dir)
    assert section(path)["exclude"] == ["cls.predictions.decoder"]
    stored = tensors(path)
    assert "cls.predictions.decoder.weight_scale" not in stored
    assert "bert.encoder.layer.0.attention.self.key.weight_scale" in stored


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ([], {"lm_head"}),
        (["--exclude_layers", ""], set()),
        (["--exclude_layers", "lm_head", "*.0.mlp.*"], {"lm_head", "gate", "up", "down"}),
    ],
    ids=["default", "none", "patterns"],
)
def test_excluded_layers_are_left_alone(flags, left, quantize):
    stored = tensors(quantize("--quant_scheme", "int8_wo", *flags)[0])
    weights = {name.removesuffix(".weight") for name, t in stored.items() if t.dim() == 2}
    plain = {name for name in weights if f"{name}.weight_scale" not in stored}
    plain -= {"model.embed_tokens"}
    assert {name.rpartition(".")[2].removesuffix("_proj") for name in plain} == left


def test_a_scheme_for_some_layers(quantize):
    flags = ["--layer_quant_scheme", "*down_proj", "int4_wo_32"]
    stored = tensors(quantize("--quant_scheme", "int8_wo", *flags)[0])
    assert stored["model.layers.1.mlp.down_proj.weight"].dtype == torch.int32
    assert stored["model.layers.1.mlp.up_proj.weight"].dtype == torch.int8


def test_the_cache(quantize):
    flags = ["--kv_cache_dtype", "fp8", "--min_kv_scale", 100, "--seq_len", 16]
    path, said = quantize("--quant_scheme", "int8_wo", *flags)
    stored = tensors(path)
    outputs = {name: t.item() for name, t in stored.items() if name.endswith("output_scale")}
    assert {name.split(".")[-2] for name in outputs} == {"k_proj", "v_proj"}
    assert set(outputs.values()) == {100.0}
    assert "fp8_e4m3 per tensor static" in said


def test_fused_layers_share_scales(quantize):
    def scales(*flags):
        stored = tensors(quantize("--quant_scheme", "fp8", *flags)[0])
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
        names += ("mlp.up_proj", "self_attn.o_proj")
        return [stored[f"model.layers.0.{name}.weight_scale"].item() for name in names]

    apart, merged = scales(), scales("--weight_matrix_merge")
    assert len(set(apart)) == 6
    assert merged == [max(apart[:3])] * 3 + [max(apart[3:5])] * 2 + apart[5:]


def test_calibration_runs_on_the_given_text(quantize, quark, model_dir, tmp_path):
    def input_scales(path):
        return {n: t for n, t in tensors(path).items() if n.endswith("input_scale")}

    given = input_scales(quantize("--quant_scheme", "int8", "--num_calib_data", 2)[0])
    path = tmp_path / "embedded"
    place = ["--model_dir", model_dir, "--output_dir", path, "--skip_evaluation"]
    assert quark("quantize", *place, "--quant_scheme", "int8").exit_code == 0
    embedded = input_scales(path)
    assert given.keys() == embedded.keys() != set()
    assert any(not torch.equal(given[name], embedded[name]) for name in given)


def test_a_config_instead_of_a_scheme(quantize, tmp_path):
    file = tmp_path / "config.json"
    config = Config(global_quant_config=scheme("int4_wo_32"), exclude=["lm_head"])
    file.write_text(json.dumps(config.to_dict()))
    by_file, _ = quantize("--config", file)
    by_name, _ = quantize("--quant_scheme", "int4_wo_32")
    ours, theirs = tensors(by_file), tensors(by_name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("everything", [True, False])
def test_a_config_without_shared_scales(quantize, everything, tmp_path, caplog):
    """Tensor scales are shared only if the file says so; a warning says that it does not."""
    file = tmp_path / "config.json"
    config = LLMTemplate.get("llama").get_config("nvfp4")
    file.write_text(json.dumps(config.to_dict(everything=everything)))
    stored = tensors(quantize("--config", file)[0])
    names = [f"model.layers.0.self_attn.{n}_proj.weight_scale_2" for n in "qkv"]
    first, *others = (stored[name] for name in names)
    assert all(torch.equal(first, other) for other in others) is everything
    assert ("has no shared_scale_groups" in caplog.text) is not everything


@pytest.mark.parametrize("text", ["{", "[1]", '{"exlude": []}'], ids=["no json", "list", "key"])
def test_a_bad_config(text, refused, model_dir, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out"]
    assert f"{file} is not" in refused("quantize", *place, "--config", file)


def test_the_native_format(quantize, quark):
    path, said = quantize("--quant_scheme", "int8_wo", "--model_export", "quark_format")
    assert {file.name for file in path.iterdir()} >= {"config.json", "model_state_dict.pth"}
    assert "import_model_from_safetensors(None, " in said
    found = json.loads(quark("inspect", path, "--json").stdout)
    assert found["schemes"][0]["layers"] == 14


def test_options_of_the_export(quantize):
    flags = ["--export_weight_format", "fake_quantized", "--pack_method", "order"]
    path, _ = quantize("--quant_scheme", "int4_wo_32", *flags)
    assert section(path)["export"]["pack_method"] == "order"
    assert tensors(path)["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_a_type_for_the_model(quantize):
    path, _ = quantize("--quant_scheme", "int8_wo", "--data_type", "bfloat16")
    assert tensors(path)["model.norm.weight"].dtype == torch.bfloat16


def test_overwriting(quantize, quark, model_dir):
    path, _ = quantize("--quant_scheme", "int8_wo")
    place = ["--model_dir", model_dir, "--output_dir", path, "--skip_evaluation"]
    again = ["quantize", *place, "--quant_scheme", "int4_wo_32"]
    before = tensors(path)
    assert quark(*again).exit_code == 2
    assert tensors(path).keys() == before.keys()
    assert quark(*again, "--overwrite").exit_code == 0
    assert tensors(path)["model.layers.0.mlp.up_proj.weight"].dtype == torch.int32


def test_the_head_of_any_model_is_lm_head(quark, bert_dir, tmp_path):
    flags = ["--quant_scheme", "int8_wo", "--exclude_layers", "lm_head", "*.0.*", "--plan"]
    result = quark("quantize", "--model_dir", bert_dir, "--output_dir", tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output


def test_a_model_without_tokenizer_is_evaluated_on_nothing(refused, bert_dir, tmp_path):
    place = ["--model_dir", bert_dir, "--output_dir", tmp_path / "out"]
    assert "no tokenizer" in refused("quantize", *place, "--quant_scheme", "int8_wo")
