"""``quark quantize --plan``: what a run takes, from headers alone; and what it took."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import import_module

import pytest
from transformers import AutoTokenizer, LlamaConfig, MambaConfig, MambaForCausalLM

from quark.cli import console, models
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.pipeline import memory_limit
from quark.torch.quantization import preparation
from tests.models.headers import write_headers

GB = 10**9
HUGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8}


@pytest.fixture(scope="module")
def huge_dir(tmp_path_factory):
    """The headers of 15 GB: a Llama with values that were never written."""
    path = tmp_path_factory.mktemp("models") / "huge"
    write_headers(LlamaConfig(num_attention_heads=64, num_key_value_heads=8, **HUGE), path)
    return path


@pytest.fixture
def room(monkeypatch):
    """Set the bytes of memory and disk that this machine has free, for plans alone."""
    import_module("quark.torch.export.recognition")  # which keeps the function as it is

    def room(memory, disk):
        usage = namedtuple("usage", "total used free")(disk, 0, disk)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        monkeypatch.setattr(memory_limit, "free_memory", lambda: memory)

    return room


@pytest.fixture
def plan_of(quark, model_dir, tmp_path):
    def plan_of(*flags, model=model_dir, code=0):
        result = quark(
            *("quantize", "--model_dir", model, "--output_dir", tmp_path / "out", "--plan"),
            *("--json", "--skip_evaluation", "--quant_scheme", *flags),
        )
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    return plan_of


def test_is_made_from_headers_alone(plan_of, huge_dir, room, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)  # would fail if it were called
    monkeypatch.setattr(models, "text_windows", None)
    monkeypatch.setattr(CheckpointReader, "tensor", None)
    room(500 * GB, 40 * GB)
    flags = ["int4_wo_128", "--quant_algo", "gptq", "--max_memory", "200GB"]
    plan = plan_of(*flags, model=huge_dir)
    entries = CheckpointReader(huge_dir).entries.values()
    size = sum(2 * math.prod(entry.shape) for entry in entries)
    assert not plan["problems"]
    assert plan["passes"] == 2
    assert size < plan["memory"] < 200 * GB
    assert plan["output"] == pytest.approx(0.3 * size, rel=0.2)
    assert 0 < plan["seconds"] < float("inf")
    quantized = [layer for layer in plan["layers"] if layer["config"]]
    assert sum(layer["number"] for layer in quantized) == 7 * 8
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_takes_the_memory_of_reading_the_tokenizer_again(plan_of, model_dir):
    def reading(*exports):
        plan = plan_of("int4_wo_32", *exports)
        return [s["memory"] for s in plan["steps"] if s["name"] == "reading the tokenizer"]

    size = (model_dir / "tokenizer.json").stat().st_size
    assert reading("--model_export", "hf_format", "--model_export", "gguf") == [10 * size]
    assert reading("--model_export", "hf_format") == []


def test_scales_of_cached_heads_take_a_pass(plan_of):
    """In 4 bits, after rotary embedding: attention is computed again for each scale."""

    def names(*flags):
        return [step["name"] for step in plan_of("int4_wo_32", "--kv_cache_dtype", *flags)["steps"]]

    at = names("int4_per_head", "--kv_cache_post_rope").index("scales of the cache")
    assert names("int4_per_head", "--kv_cache_post_rope")[at - 1] == "ranges of activations"
    for others in (["int8_per_head", "--kv_cache_post_rope"], ["int4_per_head"]):
        assert "scales of the cache" not in names(*others)


def test_an_onnx_file_takes_the_time_of_tracing(plan_of):
    onnx = plan_of("int4_wo_32", "--model_export", "onnx", "--use_cache", "--data_type", "float32")
    assert onnx["steps"][-1]["name"] == "tracing the graph"
    assert onnx["seconds"] >= onnx["steps"][-1]["seconds"] > 6
    others = plan_of("int4_wo_32", "--data_type", "float32")
    assert others["seconds"] < 6 and not any(step["seconds"] for step in others["steps"])


def test_layers_are_chosen_once(plan_of, mixtral_dir, monkeypatch):
    """That takes seconds where a model has thousands of experts."""
    assign, calls = preparation.assign, []
    monkeypatch.setattr(preparation, "assign", lambda *args: calls.append(args) or assign(*args))
    plan = plan_of("int4_wo_32", model=mixtral_dir)
    assert sum(layer["number"] for layer in plan["layers"] if layer["config"]) == 2 * (4 + 3 * 4)
    assert len(calls) == 1


def test_says_what_does_not_fit(plan_of, quark, huge_dir, room, tmp_path):
    room(500 * GB, 3 * GB)
    flags = ["int4_wo_128", "--quant_algo", "gptq", "--max_memory", "4GB"]
    memory, disk = plan_of(*flags, model=huge_dir, code=1)["problems"]
    assert "3.0 GB free" in disk
    least = int(re.search(r"--max_memory (\d+)GB", memory)[1])
    plan = plan_of(*flags[:-1], f"{least}GB", model=huge_dir, code=1)
    assert plan["memory"] <= least * GB
    (problem,) = plan["problems"]  # what does not have to leave memory needs no disk
    assert "3.0 GB free" in problem
    result = quark(
        *("quantize", "--model_dir", huge_dir, "--quant_scheme", *flags, "--plan"),
        *("--output_dir", tmp_path / "out", "--skip_evaluation"),
    )
    assert result.exit_code == 1
    assert "in float: excluded by lm_head" in result.stdout
    assert "is too little" in result.stdout


def test_names_are_whole_on_a_narrow_terminal(quark, huge_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "out", console._Console(highlight=False, width=80))
    result = quark(
        *("quantize", "--model_dir", huge_dir, "--quant_scheme", "fp8", "--plan"),
        *("--output_dir", tmp_path / "out", "--skip_evaluation"),
    )
    _, table = result.stdout.split("\nLayers")
    header, *rows = [line for line in table.splitlines() if line.strip(" ─")]
    assert header.split() == ["layers", "number", "shape", "weight", "input"]
    name = "".join(row[: header.index("number")].strip() for row in rows)
    assert "model.layers.*.self_attn.q_proj" in name and "model.layers.*.mlp.down_proj" in name


def test_a_run_is_refused_before_work(refused, huge_dir, room, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", None)
    place = ["quantize", "--model_dir", huge_dir, "--output_dir", tmp_path / "out"]
    place += ["--quant_scheme", "int4_wo_128", "--skip_evaluation"]
    assert "is too little" in refused(*place, "--max_memory", "1GB")
    room(500 * GB, GB)
    assert "1.0 GB free" in refused(*place, "--max_memory", "90GB")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def mamba_dir(model_dir, tmp_path):
    """A model that reads the weight of ``dt_proj`` without calling it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 8}
    vocabulary = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    MambaForCausalLM(MambaConfig(vocab_size=vocabulary, **sizes)).save_pretrained(tmp_path / "m")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("scheme", ["fp8", "ptpc_int8"])
def test_inputs_that_no_layer_takes_are_planned_and_written_in_float(
    plan_of, quantize, mamba_dir, scheme
):
    plan = plan_of(scheme, model=mamba_dir)
    planned = {x["name"]: bool(x["config"]["input_tensors"]) for x in plan["layers"] if x["config"]}
    assert [name for name, has_inputs in planned.items() if not has_inputs] == [
        "backbone.layers.*.mixer.dt_proj"
    ]
    path, _ = quantize("--quant_scheme", scheme, model=mamba_dir)
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    [(pattern, layer)] = section["layer_quant_config"].items()
    assert (pattern, layer["input_tensors"]) == ("backbone.layers.*.mixer.dt_proj", None)
    assert section["global_quant_config"]["input_tensors"]


def test_a_layout_that_needs_inputs_is_refused_before_work(refused, mamba_dir, tmp_path):
    place = ["--model_dir", mamba_dir, "--output_dir", tmp_path / "out"]
    said = refused("quantize", *place, "--quant_scheme", "fp8", "--custom_mode", "fp8")
    assert "cannot hold backbone.layers.0.mixer.dt_proj and 1 more: its input is not" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--plan", "--skip_quantization"], "--plan: only a run that quantizes"),
    ],
)
def test_flags_that_contradict(flags, said, refused, model_dir):
    assert said in refused("quantize", "--model_dir", model_dir, *flags)


RUN = """
import sys
from quark.cli.main import main
from quark.torch.pipeline.machine import peak_memory
try:
    main()
finally:
    print("peak", peak_memory(), file=sys.stderr)
"""


def test_the_run_stays_under_its_plan_and_reaches_most_of_it(model_dir, text, tmp_path):
    flags = ["--dataset", text, "--num_calib_data", "4", "--skip_evaluation"]
    flags += ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq"]
    command = [sys.executable, "-c", RUN, "quantize", "--model_dir", model_dir, *flags]
    command += ["--output_dir", tmp_path / "out"]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak = int(re.search(r"peak (\d+)", done.stderr)[1])
    planned = re.search(r"memory +(\d+) MB  \(planned (\d+) MB\)", done.stdout)
    assert int(planned[1]) == pytest.approx(peak / 1e6, rel=0.02)
    assert 0.6 <= peak / (1e6 * int(planned[2])) <= 1
    assert re.search(r"disk .*\(planned .*B\)", done.stdout)
    assert re.search(r"time .*\(planned .*\)", done.stdout)
