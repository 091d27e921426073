"""Models that are read from files when they are used: the same bits as those in memory."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.export.recognition import load_checkpoint
from quark.torch.graph.residency import residency_of, resident
from quark.torch.numerics.native.memory import spares_memory
from quark.torch.pipeline.residency import is_placeholder
from quark.torch.quantization.algorithms import UnfitModelError
from quark.torch.quantization.config import algo
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.search.mixtures import measure_costs
from quark.torch.statistics.collection import collect_statistics
from tests.models.architectures import build, small_config
from tests.models.matrix import FAMILIES, WAYS, quantized

KINDS = ("llama", "opt", "gpt2", "mixtral", "llama4_text", "gemma3_text")
BIASED = ("opt", "gpt2")  # layers have biases, which bias correction changes
ROTATION = algo.RotationConfig(r1=True, r2=True, r3=False, r4=True)
ONLINE = algo.RotationConfig(
    rotation_size=32,
    online_config=algo.OnlineRotationConfig(
        online_rotation_layers=["*_proj"], use_input_prescale=True
    ),
)
ALGORITHMS = {
    "nearest": [],
    "smooth": [algo.SmoothQuantConfig()],
    "autosmoothquant": [algo.AutoSmoothQuantConfig()],
    "awq": [algo.AWQConfig()],
    "gptq": [algo.GPTQConfig()],
    "act order": [algo.GPTQConfig(desc_act=True)],
    "gptaq": [algo.GPTAQConfig()],
    "qronos": [algo.QronosConfig()],
    "yaqa": [algo.YaqaConfig()],
    "autoround": [algo.AutoRoundConfig(iters=2)],
    "joint tuning": [algo.BlockwiseJointTuningConfig(epochs=1)],
    "rotation": [ROTATION],
    "online": [ONLINE, algo.GPTQConfig()],
    "svdquant": [algo.SVDQuantConfig(svd_rank=4, min_layer_size=0, use_gptq=True)],
    "cle, bias": [algo.CLEConfig(), algo.BiasCorrectionConfig()],
    "sparsegpt": [algo.SparseGPTConfig()],
    "wanda, qronos": [algo.WandaConfig(), algo.QronosConfig()],
    "awq, gptq": [algo.AWQConfig(), algo.GPTQConfig()],
}
SLICE = [
    ("llama", "int8", "awq, gptq"),
    ("llama", "fp8", "rotation"),
    ("mixtral", "int8", "smooth"),
    ("opt", "fp8", "qronos"),
    ("opt", "int8", "cle, bias"),
    ("mixtral", "mxfp4", "svdquant"),
    ("llama", "mxfp4", "online"),
    ("mixtral", "fp8", "wanda, qronos"),
    ("llama4_text", "int8", "awq, gptq"),
    ("llama4_text", "mxfp4", "yaqa"),
]


def in_memory(directory):
    return load_checkpoint(directory)


def streamed(directory):
    """A model of which one unit is in memory, and no hidden states are."""
    model = stream_model(directory)
    residency_of(model).limit = residency_of(model).activation_limit = 0
    return model


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def written(load, source, target, name, algorithms, batches, **options):
    """The files of a quantized model, and its perplexity on random tokens."""
    kv = {"*k_proj": scheme(name, 32), "*v_proj": scheme(name, 32)} if name == "fp8" else {}
    config = Config(
        scheme(name, 32), exclude=["lm_head"], algo_config=algorithms or None, **options
    )
    config.kv_cache_quant_config = kv
    model = load(source)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
    value = perplexity(model, torch.arange(64).view(4, 16), batch_size=3)
    ModelExporter(None, target).export_safetensors_model(model, max_shard_size="10KB")
    return contents(target), value


def check(kind, name, algorithms, batches, tmp_path):
    build(small_config(kind), torch.bfloat16).save_pretrained(tmp_path / "model")
    args = name, algorithms, batches
    expected = written(in_memory, tmp_path / "model", tmp_path / "expected", *args)
    assert written(streamed, tmp_path / "model", tmp_path / "out", *args) == expected
    assert any("-of-" in name for name in expected[0])


@pytest.mark.parametrize(("kind", "name", "way"), SLICE)
@pytest.mark.sampled(6)
def test_a_slice(kind, name, way, batches, tmp_path):
    check(kind, name, ALGORITHMS[way], batches, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ALGORITHMS)
@pytest.mark.parametrize("name", ["fp8", "int8", "mxfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_all(kind, name, way, batches, tmp_path):
    if way == "cle, bias" and kind not in BIASED:
        with pytest.raises(UnfitModelError, match="no layer with a quantized weight has a bias"):
            check(kind, name, ALGORITHMS[way], batches, tmp_path)
    else:
        check(kind, name, ALGORITHMS[way], batches, tmp_path)


def check_matrix(case, way, tmp_path):
    case.build().save_pretrained(tmp_path / "model")
    states = []
    for load in (in_memory, streamed):
        try:
            model = quantized(case, way, load(tmp_path / "model"))
        except ValueError as error:
            states.append(str(error))
            continue
        with resident(model, ""):
            states.append({n: t.clone() for n, t in model.state_dict().items()})
    expected, own = states
    if isinstance(expected, str):
        assert own == expected
    else:
        assert own.keys() == expected.keys()
        assert not [n for n in own if not torch.equal(own[n], expected[n])]


CASES = {case.name: case for cases in FAMILIES.values() for case in cases}


@pytest.mark.parametrize(("name", "way"), [("BART", "fp8"), ("Llava", "gptq")])
def test_a_slice_of_other_models(name, way, tmp_path):
    check_matrix(CASES[name], way, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_other_models(name, way, tmp_path):
    check_matrix(CASES[name], way, tmp_path)


@pytest.mark.parametrize("mode", ["quark", "compressed-tensors"])
def test_a_quantized_model(mode, batches, tmp_path):
    model = build(small_config("mixtral"), torch.bfloat16)
    config = Config(scheme("int4_wo_32", 32), exclude=["lm_head"])
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
    ModelExporter(None, tmp_path / "out").export_safetensors_model(model, custom_mode=mode)
    expected = load_checkpoint(tmp_path / "out")
    model = load_checkpoint(tmp_path / "out", max_memory=1 << 40)
    cache = residency_of(model)
    cache.limit = 0
    assert all(p.is_meta or is_placeholder(p) for p in model.parameters())
    windows = torch.arange(64).view(4, 16)
    assert perplexity(model, windows) == perplexity(expected, windows)
    with torch.no_grad():
        assert torch.equal(model(windows).logits, expected(windows).logits)
    whole = sum(t.nbytes for t in expected.state_dict().values())
    assert 0 < cache.peak < whole * 0.7


@pytest.mark.parametrize("is_quantized", [False, True])
def test_kernels_are_left_out_while_a_model_under_a_bound_lives(
    is_quantized, tmp_path, monkeypatch
):
    build(small_config("llama")).save_pretrained(tmp_path / "model")
    source = tmp_path / ("out" if is_quantized else "model")
    if is_quantized:
        config = Config(scheme("int8_wo"), exclude=["lm_head"])
        ModelQuantizer(config).direct_quantize_checkpoint(str(tmp_path / "model"), str(source))
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    with_bound = load_checkpoint(source, max_memory=1 << 40)
    assert spares_memory()
    del with_bound
    gc.collect()
    assert not spares_memory()
    load_checkpoint(source)
    assert not spares_memory()


def test_a_tied_head_is_read_once(batches, tmp_path):
    build(small_config("llama", tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    config = Config(scheme("int8_wo"), exclude=["lm_head"])
    source, out = str(tmp_path / "model"), str(tmp_path / "out")
    ModelQuantizer(config).direct_quantize_checkpoint(source, out)
    expected, model = load_checkpoint(out), load_checkpoint(out, max_memory=1 << 40)
    for names in (["lm_head", "model.embed_tokens"], ["model.embed_tokens", "lm_head"]):
        with torch.no_grad(), resident(model, names[0]), resident(model, names[1]):
            places = {model.get_submodule(name).weight.data_ptr() for name in names}
            assert len(places) == 1
            assert torch.equal(model(batches[0]).logits, expected(batches[0]).logits)
        residency_of(model).release()
        assert all(is_placeholder(model.get_submodule(name).weight) for name in names)


@pytest.mark.parametrize("excluded", [["lm_head"], []])
def test_inputs_go_where_a_quantized_model_says(excluded, batches, tmp_path):
    """Codes that are not in memory are on the meta device, and so is a quantized embedding."""
    build(small_config("llama")).save_pretrained(tmp_path / "model")
    layers = {} if excluded else {nn.Embedding: scheme("int8_wo")}
    config = Config(scheme("int8_wo"), exclude=excluded, layer_type_quant_config=layers)
    source, out = str(tmp_path / "model"), str(tmp_path / "out")
    ModelQuantizer(config).direct_quantize_checkpoint(source, out)
    expected, model = load_checkpoint(out), load_checkpoint(out, max_memory=1 << 40)
    ids = batches[0]["input_ids"] if isinstance(batches[0], dict) else batches[0]
    if excluded:
        assert model.device == expected.device
        with torch.no_grad():
            assert torch.equal(model(ids.to(model.device)).logits, expected(ids).logits)
        residency_of(model).release()
        assert model.device == expected.device
    else:
        assert model.device.type == "meta"
    with pytest.raises(ValueError, match="an input is on the meta device and has no values"):
        model(ids.to("meta"))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_statistics_and_costs(kind, batches, tmp_path):
    build(small_config(kind), torch.bfloat16).save_pretrained(tmp_path)
    formats = {name: scheme(name, 32) for name in ("int4_wo_32", "int8_wo")}
    results = []
    for load in (in_memory, streamed):
        model = load(tmp_path)
        statistics = collect_statistics(model, batches, probes=1)
        costs = measure_costs(model, statistics, formats, exclude=["lm_head"], solved=True)
        # The same model once more: what was measured is gone.
        config = Config(scheme("int4_wo_32", 32), exclude=["lm_head"])
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
        with resident(model, ""):
            state = {name: t.clone() for name, t in model.state_dict().items()}
        results.append((statistics, costs, state))
    (expected, expected_costs, expected_state), (found, costs, state) = results
    assert found.model == expected.model and found.probes == expected.probes
    assert costs == expected_costs
    for name, gram in expected.inputs.items():
        assert torch.equal(found.inputs[name].total, gram.total)
    assert not [n for n, t in expected_state.items() if not torch.equal(state[n], t)]


def test_a_failure_leaves_the_values_of_the_files(batches, tmp_path, monkeypatch):
    build(small_config("llama"), torch.bfloat16).save_pretrained(tmp_path)
    model = streamed(tmp_path)
    config = Config(scheme("int8"), algo_config=[ROTATION, algo.GPTQConfig()])
    before = {name: type(module) for name, module in model.named_modules()}

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quark.torch.quantization.api.mark_as_quantized", fail)
        with pytest.raises(KeyboardInterrupt):
            ModelQuantizer(config).quantize_model(model, batches)
    assert {name: type(module) for name, module in model.named_modules()} == before
    original = in_memory(tmp_path)
    with resident(model, ""):
        state = model.state_dict()
        assert all(torch.equal(state[n], t) for n, t in original.state_dict().items())


def test_learned_rotations_are_refused(batches, tmp_path):
    build(small_config("llama"), torch.bfloat16).save_pretrained(tmp_path)
    config = Config(scheme("int8"), algo_config=[algo.RotationConfig(trainable=True)])
    with pytest.raises(ValueError, match="which must be in memory"):
        ModelQuantizer(config).quantize_model(streamed(tmp_path), batches)


def test_less_memory_than_is_taken_is_refused(tmp_path):
    build(small_config("llama"), torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"max_memory: 1 MB are less than the \d+ MB"):
        load_checkpoint(tmp_path, max_memory=10**6)


PROGRAM = """
import sys, torch, psutil
import transformers.models.llama.modeling_llama
from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.search.mixtures import measure_costs
from quark.torch.statistics.collection import collect_statistics
before = psutil.Process().memory_info().rss
model = load_checkpoint(sys.argv[1], max_memory=before + int(sys.argv[3]))
config = Config(scheme("int8_wo"), exclude=["lm_head"])
model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
ModelExporter(None, sys.argv[2]).export_safetensors_model(model)
with open("/proc/self/status") as status:
    print(next(int(l.split()[1]) * 1024 for l in status if l.startswith("VmHWM")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_does_not_grow_with_the_number_of_blocks(tmp_path):
    peaks, bound = [], 150 << 20
    for layers in (12, 36):
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": layers}
        model = build(small_config("llama", **sizes), torch.bfloat16)
        model.save_pretrained(tmp_path / f"{layers}")
        paths = [str(tmp_path / f"{layers}"), str(tmp_path / f"{layers}-out")]
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM, *paths, str(bound)],
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append(int(found.stdout.split()[-1]))
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    assert peaks[1] < peaks[0] + 8 * block  # of 24 more blocks
    assert max(peaks) < bound


EVALUATION = """
import sys, torch, psutil
import transformers.models.llama.modeling_llama
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.export.recognition import load_checkpoint
before = psutil.Process().memory_info().rss
model = load_checkpoint(sys.argv[1], max_memory=before + int(sys.argv[2]))
perplexity(model, torch.arange(64).view(2, 32))
with open("/proc/self/status") as status:
    print(next(int(l.split()[1]) * 1024 for l in status if l.startswith("VmHWM")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_an_evaluation_keeps_to_its_bound(tmp_path):
    """The weights are 31 million values, and so are their codes when they are unpacked."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    build(small_config("llama", **sizes), torch.bfloat16).save_pretrained(tmp_path / "model")
    config = Config(scheme("int4_wo_64"), exclude=["lm_head"])
    source, out, bound = str(tmp_path / "model"), str(tmp_path / "out"), 100 << 20
    ModelQuantizer(config).direct_quantize_checkpoint(source, out)
    peak = subprocess.run(
        [sys.executable, "-c", EVALUATION, out, str(bound)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert int(peak.stdout.split()[-1]) < bound
