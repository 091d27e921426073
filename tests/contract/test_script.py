"""The documented script: its command lines run as they are, but for the paths of models."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file

from quark.cli.quantize import job
from quark.cli.quantize.request import Request
from quark.torch.evaluation import hub_access, tasks

SCRIPT = Path(__file__).parents[2] / "examples/torch/language_modeling/llm_ptq/quantize_quark.py"
LINES = [f"Line {i} says that a range needs some text to be measured on." for i in range(400)]


class FewTasks:
    """Stands for the harness: tasks whose scores are those of nobody."""

    def __init__(self, names, *_):
        self.names = names

    def score(self, *_):
        return {name: {"acc": tasks.Score(0.5, 0.25)} for name in self.names}


@pytest.fixture
def hub(monkeypatch):
    """A Hub with the data sets of calibration and evaluation; lists what was asked of it."""
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, configuration, split))
        return [{"text": line} for line in LINES]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub_access, "find_obstacle", lambda: None)
    monkeypatch.setattr(tasks, "Tasks", FewTasks)
    return asked


@pytest.fixture
def script(monkeypatch, capsys):
    """Run the script in this process; returns its exit code and what it printed."""

    def script(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return script


@pytest.fixture
def request_of(script, monkeypatch):
    """What the flags of a command line come to, without the work."""

    def request_of(*flags):
        seen = []
        monkeypatch.setattr(job, "run", seen.append)
        code, _, complaint = script("--model_dir", "in", *flags)
        assert code == 0, complaint
        return seen[0]

    return request_of


def section(path):
    return json.loads((path / "config.json").read_text())["quantization_config"]


def test_fp8_with_autosmoothquant_for_vllm(script, hub, llama_dir, tmp_path):
    out = tmp_path / "output"
    code, _, complaint = script(
        *("--model_dir", llama_dir),
        *("--output_dir", out),
        *("--quant_scheme", "w_fp8_a_fp8"),
        *("--kv_cache_dtype", "fp8"),
        *("--custom_mode", "fp8"),
        *("--quant_algo", "autosmoothquant"),
        *("--num_calib_data", "512"),
        *("--model_export", "hf_format"),
        "--skip_evaluation",
    )
    assert code == 0, complaint
    assert section(out)["quant_method"] == "fp8"
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert [name for name in stored if name.endswith(("k_scale", "k_proj.output_scale"))]
    (pile,) = hub  # and no other text, as nothing is evaluated
    assert pile[0] == "mit-han-lab/pile-val-backup" and pile[2].startswith("validation")


def test_int8_with_rotation_and_smoothquant_evaluated_in_tasks(script, hub, llama_dir, tmp_path):
    out = tmp_path / "output"
    code, said, complaint = script(
        *("--model_dir", llama_dir),
        *("--output_dir", out),
        *("--quant_scheme", "w_int8_per_channel_a_int8_per_tensor_sym"),
        *("--kv_cache_dtype", "int8_per_tensor_static"),
        *("--pre_quantization_optimization", "rotation"),
        *("--pre_quantization_optimization", "smoothquant"),
        *("--num_calib_data", "512"),
        *("--model_export", "hf_format"),
        *("--tasks", "gsm8k,wikitext"),
    )
    assert code == 0, complaint
    written = section(out)
    assert [a["name"] for a in written["algo_config"]] == ["rotation", "smooth"]
    specs = written["global_quant_config"]
    assert specs["weight"]["qscheme"] == "per_channel"
    assert specs["input_tensors"]["qscheme"] == "per_tensor"
    assert hub[1][:2] == ("Salesforce/wikitext", "wikitext-2-raw-v1") and hub[1][2] == "test"
    for task in ("gsm8k", "wikitext"):
        assert f"{task}  " in said
    assert said.count("0.5000 ± 0.2500") == 2
    assert "perplexity" in said


def test_quantized_then_reloaded_and_evaluated(script, hub, llama_dir, tmp_path):
    out, metrics = tmp_path / "output", tmp_path / "metrics"
    evaluation = ("--save_metrics_to_csv", "--metrics_output_dir", metrics, "--num_eval_data", 4)
    first = ("--model_dir", llama_dir, "--quant_scheme", "int4_wo_32", *evaluation)
    code, _, complaint = script(*first, "--model_export", "hf_format", "--output_dir", out)
    assert code == 0, complaint
    measured = (metrics / "evaluation_metrics.csv").read_text()
    assert measured.startswith("Perplexity,")
    for flags in (
        ("--model_reload", "--import_model_dir", out, "--import_file_format", "hf_format"),
        ("--model_reload", "--output_dir", out, "--skip_quantization"),
    ):
        (metrics / "evaluation_metrics.csv").unlink()
        code, _, complaint = script("--model_dir", llama_dir, *flags, *evaluation)
        assert code == 0, complaint
        assert (metrics / "evaluation_metrics.csv").read_text() == measured


def test_parameters_saved_and_loaded(script, hub, llama_dir, tmp_path):
    params, metrics = tmp_path / "params", tmp_path / "metrics"
    evaluation = ("--save_metrics_to_csv", "--metrics_output_dir", metrics, "--num_eval_data", 4)
    flags = ("--quant_scheme", "w_int8_per_tensor_sym", "--params_save", "--save_dir", params)
    code, said, complaint = script("--model_dir", llama_dir, *flags, *evaluation)
    assert code == 0, complaint
    assert "no checkpoint" in said and {p.name for p in tmp_path.iterdir()} == {"params", "metrics"}
    measured = (metrics / "evaluation_metrics.csv").read_text()
    files = ("--json_path", params / "llama.json")
    files += ("--safetensors_path", params / "llama.safetensors")
    code, _, complaint = script("--model_dir", llama_dir, "--params_load", *files, *evaluation)
    assert code == 0, complaint
    assert (metrics / "evaluation_metrics.csv").read_text() == measured


def test_as_a_process(llama_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES))
    command = [sys.executable, SCRIPT, "--model_dir", llama_dir, "--output_dir", tmp_path / "out"]
    flags = ["--quant_scheme", "fp8", "--dataset", text, "--model_export", "hf_format"]
    flags += ["--num_calib_data", 2, "--skip_evaluation", "--device", "cpu", "--exclude_layers"]
    done = subprocess.run(
        [str(part) for part in (*command, *flags)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert section(tmp_path / "out")["exclude"] == []


def test_files_to_files_without_an_export(script, hub, llama_dir, tmp_path):
    """The documented script writes them whatever --model_export says."""
    place = ("--model_dir", llama_dir, "--output_dir", tmp_path / "out", "--skip_evaluation")
    code, _, complaint = script(*place, "--quant_scheme", "ptpc_fp8", "--file2file_quantization")
    assert code == 0, complaint
    assert section(tmp_path / "out")["global_quant_config"]["weight"]["dtype"] == "fp8_e4m3"


def test_without_the_hub(script, hub, llama_dir, tmp_path, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    place = ("--model_dir", llama_dir, "--output_dir", tmp_path / "out")
    for flags, named in [
        (("--quant_scheme", "fp8"), "--dataset"),
        (("--quant_scheme", "int8_wo"), "--eval_data"),
    ]:
        code, _, complaint = script(*place, *flags)
        assert code == 2
        assert named in complaint and "give a text file" in complaint
    assert list(tmp_path.iterdir()) == []


def test_documented_defaults(request_of):
    wanted = request_of("--quant_scheme", "fp8")
    documented = {
        "dataset": "pileval",
        "data_type": "auto",
        "batch_size": 1,
        "num_calib_data": 512,
        "model_attn_implementation": "eager",
        "custom_mode": "quark",
        "pack_method": "reorder",
        "export_weight_format": "real_quantized",
        "eval_data": "wikitext",
        "num_eval_data": -1,
        "max_eval_batch_size": 64,
        "num_fewshot": None,
        "tasks": None,
        "ppl_eval_for_kv_cache_context_size": 1024,
        "ppl_eval_for_kv_cache_sample_size": 512,
        "ppl_eval_for_kv_cache_patch_size": None,
        "exclude_layers": None,
        "scale_format": "e4m3",
        "quant_algo": None,
        "skip_evaluation": False,
    }
    assert {name: getattr(wanted, name) for name in documented} == documented
    paths = ("output_dir", "save_dir", "metrics_output_dir")
    assert [str(getattr(wanted, p)) for p in paths] == [
        *("exported_model", "model_params", "metrics_output_dir")
    ]
    assert wanted.exports == []


# Every documented flag, older and newer: (flag, its values, field of the request, value).
FLAGS = [
    ("revision", ["main"], "revision", "main"),
    ("device", ["cuda"], "device", "cuda"),
    ("multi_gpu", [], "multi_gpu", [""]),
    ("multi_gpu", ["balanced"], "multi_gpu", ["balanced"]),
    ("model_attn_implementation", ["sdpa"], "model_attn_implementation", "sdpa"),
    ("multi_device", [], "multi_device", True),
    ("dataset", ["ScienceQA"], "dataset", "ScienceQA"),
    ("data_type", ["bfloat16"], "data_type", "bfloat16"),
    ("seq_len", ["128"], "seq_len", 128),
    ("batch_size", ["4"], "batch_size", 4),
    ("num_calib_data", ["7"], "num_calib_data", 7),
    ("skip_quantization", [], "skip_quantization", True),
    ("group_size", ["64"], "group_size", 64),
    ("group_size_per_layer", ["lm_head", "32"], "layer_group_sizes", [("lm_head", 32)]),
    ("file2file_quantization", [], "file2file_quantization", True),
    ("quant_flow", ["per_block"], "quant_flow", "per_block"),
    ("gpu_resident_blocks", ["2"], "gpu_resident_blocks", "2"),
    ("quant_scheme", ["fp8"], "quant_scheme", "fp8"),
    ("layer_quant_scheme", ["*down_proj", "fp8"], "layer_schemes", [("*down_proj", "fp8")]),
    ("kv_cache_dtype", ["mxfp8"], "kv_cache_dtype", "mxfp8"),
    ("kv_cache_quant_scheme", ["fp8"], "kv_cache_dtype", "fp8"),
    ("min_kv_scale", ["0.5"], "min_kv_scale", 0.5),
    ("kv_cache_post_rope", [], "kv_cache_post_rope", True),
    ("attention_dtype", ["fp8"], "attention_scheme", "fp8"),
    ("fp8_attention_quant", [], "fp8_attention_quant", True),
    ("pre_quantization_optimization", ["quarot"], "algorithms", ["quarot"]),
    ("pre_optimization_config_file_path", ["a.json"], "quant_algo_config_file", ["a.json"]),
    ("quant_algo", ["awq,gptq"], "algorithms", ["awq", "gptq"]),
    ("quant_algo_config_file", ["awq", "a.json"], "quant_algo_config_file", ["awq", "a.json"]),
    ("quant_algo_config_file_path", ["a.json"], "quant_algo_config_file", ["a.json"]),
    ("exclude_layers", ["*lm_head", "*0.mlp*"], "excluded", ["*lm_head", "*0.mlp*"]),
    ("exclude_layers", [], "excluded", []),
    ("scale_format", ["float32"], "scale_format", "float32"),
    ("scale_calculation_mode", ["floor"], "scale_calculation_mode", "floor"),
    (
        "moe_experts_second_step_config",
        ["w_int4_per_channel_sym"],
        "moe_experts_second_step_config",
        "w_int4_per_channel_sym",
    ),
    ("enable_native_inference", [], "enable_native_inference", True),
    ("native_linear_mode", ["auto"], "native_linear_mode", "auto"),
    ("model_reload", [], "model_reload", True),
    ("import_model_dir", ["x"], "import_model_dir", Path("x")),
    ("import_file_format", ["hf_format"], "import_file_format", "hf_format"),
    ("params_load", [], "params_load", True),
    ("json_path", ["x.json"], "json_path", Path("x.json")),
    ("safetensors_path", ["x"], "safetensors_path", Path("x")),
    ("model_export", ["quark_format"], "exports", ["quark_format"]),
    ("model_export", ["hf_format", "--model_export", "gguf"], "exports", ["hf_format", "gguf"]),
    ("custom_mode", ["awq"], "custom_mode", "awq"),
    ("torch_compile", [], "torch_compile", True),
    ("pack_method", ["order"], "pack_method", "order"),
    ("output_dir", ["x"], "output_dir", Path("x")),
    ("weight_matrix_merge", [], "weight_matrix_merge", True),
    ("export_weight_format", ["fake_quantized"], "export_weight_format", "fake_quantized"),
    ("no_keep_prequantized_layers", [], "no_keep_prequantized_layers", True),
    ("params_save", [], "params_save", True),
    ("save_dir", ["x"], "save_dir", Path("x")),
    ("skip_evaluation", [], "skip_evaluation", True),
    ("evaluation_dataset", ["pileval"], "eval_data", "pileval"),
    ("eval_data_dir", ["x"], "eval_data", "x"),
    ("use_ppl_eval_model", [], "use_ppl_eval_model", True),
    ("save_metrics_to_csv", [], "save_metrics_to_csv", True),
    ("metrics_output_dir", ["x"], "metrics_output_dir", Path("x")),
    ("tasks", ["gsm8k,wikitext"], "tasks", "gsm8k,wikitext"),
    ("use_ppl_eval_for_kv_cache", [], "use_ppl_eval_for_kv_cache", True),
    *(
        (f"ppl_eval_for_kv_cache_{part}_size", ["3"], f"ppl_eval_for_kv_cache_{part}_size", 3)
        for part in ("context", "sample", "patch")
    ),
    ("eval_batch_size", ["auto:4"], "eval_batch_size", "auto:4"),
    ("max_eval_batch_size", ["3"], "max_eval_batch_size", 3),
    ("num_eval_data", ["-1"], "num_eval_data", -1),
    ("num_fewshot", ["5"], "num_fewshot", 5),
    ("apply_chat_template", [], "apply_chat_template", True),
    ("use_mlperf_rouge", [], "use_mlperf_rouge", True),
    ("use_tp", [], "use_tp", True),
    ("trust_remote_code", [], "trust_remote_code", True),
    ("no_trust_remote_code", [], "trust_remote_code", False),
]


@pytest.mark.parametrize(("flag", "values", "field", "value"), FLAGS)
def test_every_documented_flag_is_understood(flag, values, field, value, request_of):
    assert getattr(request_of(f"--{flag}", *values), field) == value


def test_every_flag_has_its_line_in_the_documentation():
    text = (SCRIPT.parents[4] / "docs/command-line.md").read_text(encoding="utf-8")
    names = {field.name for field in fields(Request)} - {"given"}
    assert {f"--{name}" for name in names} - set(re.findall(r"--\w+", text)) == set()
