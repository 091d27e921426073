import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quark.torch import ModelQuantizer, load_params
from quark.torch.export.onnx.runtime import OnnxSession
from quark.torch.quantization.config.config import (
    Config,
    PassOptions,
    QuantizationSpec,
    ShiftLimits,
)
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    export,
    graph_config,
    images,
    network,
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A graph and samples."""
    path = tmp_path_factory.mktemp("graph")
    torch.export.save(torch.export.export(network("unet"), tuple(images(1))), path / "net.pt2")
    save_file({"x": torch.cat(images(3))}, path / "samples.safetensors")
    config = Config(EVERYTHING, quant_mode="fx_graph_mode").to_dict()
    (path / "config.json").write_text(json.dumps(config))
    return path


def command(files, output, *flags):
    data = ("--dataset", files / "samples.safetensors")
    return ["quantize", "--model_dir", files / "net.pt2", "--output_dir", output, *data, *flags]


def test_a_graph_is_quantized_and_written(files, quark, tmp_path):
    result = quark(*command(files, tmp_path / "out", "--config", files / "config.json"))
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / "net_quantized.pth"
    loaded = load_params(pth_path=path, quant_mode="fx_graph_mode", check_digests=True)
    quantizer = ModelQuantizer(graph_config())
    expected = quantizer.freeze(quantizer.quantize_model(export(network("unet")), images()))
    with torch.no_grad():
        assert torch.equal(loaded(images(1)[0]), expected(images(1)[0]))


def test_schemes(files, quark, tmp_path):
    flags = ("--quant_scheme", "int8", "--num_calib_data", "4")
    assert quark(*command(files, tmp_path / "out", *flags)).exit_code == 0
    assert (tmp_path / "out" / "net_quantized.pth").is_file()


def test_onnx_is_written_and_runs(files, quark, tmp_path):
    pytest.importorskip("onnxruntime")
    flags = ("--config", files / "config.json", "--model_export", "onnx", "--verify")
    result = quark(*command(files, tmp_path / "out", *flags))
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / "quark_model.onnx"
    assert "verified: opened by onnxruntime" in result.output
    assert str(path) in "".join(result.output.split("\n"))
    (found,) = OnnxSession(path).run(images(1)[0])
    quantizer = ModelQuantizer(graph_config())
    frozen = quantizer.freeze(quantizer.quantize_model(export(network("unet")), images()))
    with torch.no_grad():
        expected = frozen(images(1)[0])
    scale = float(expected.abs().max()) / 127
    codes = ((found - expected) / scale).abs().round()  # ties go either way, and change others
    assert float((codes == 0).double().mean()) > 0.98 and float(codes.max()) <= 2


WRONG = {
    "another file": (["--dataset", "text.txt"], "expected a .safetensors file"),
    "missing data": (["--dataset", "none.safetensors"], "none.safetensors does not exist"),
    "a flag of other models": (["--kv_cache_dtype", "fp8"], "does not apply to a graph"),
    "a container of other models": (["--model_export", "gguf"], "an archive, or with"),
    "an archive to verify": (["--verify"], "give --model_export onnx, too"),
    "a missing graph": (["--model_dir", "none.pt2"], "none.pt2 does not exist"),
    "a pattern of nothing": (["--layer_quant_scheme", "dwn", "int8"], "Nearest: down"),
    "a pattern that comes too late": (
        ["--layer_quant_scheme", "*", "int8", "--layer_quant_scheme", "down", "int8"],
        "'*' comes before and matches the same layers",
    ),
    "a pattern of layers in float": (
        ["--layer_quant_scheme", "add*", "int8", "--exclude_layers", "add*"],
        "--exclude_layers keeps these layers in float",
    ),
    "limits without a name": (["--shift_limits", "cut=0:16,3:4"], "got '3:4'"),
    "limits of another name": (["--shift_limits", "cat=0:16"], "cut, bias, read"),
    "limits in the wrong order": (["--shift_limits", "cut=16:0"], "the smallest shift first"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_flags_are_refused(files, refused, tmp_path, flags, message):
    scheme = ("--quant_scheme", "int8")
    assert message in refused(*command(files, tmp_path / "out", *scheme, *flags))
    assert not (tmp_path / "out").exists()


def test_passes_are_asked_for_by_flags_and_by_the_file(files, quark, refused, tmp_path):
    class Pooled(nn.Module):
        def forward(self, x):
            return nn.functional.silu(nn.functional.adaptive_avg_pool2d(x, 1))

    program = torch.export.export(nn.Sequential(nn.Conv2d(3, 4, 1), Pooled()), tuple(images(1)))
    torch.export.save(program, tmp_path / "pooled.pt2")
    save_file({"input": torch.cat(images(2))}, tmp_path / "pooled.safetensors")
    config = Config(EVERYTHING, pass_options=PassOptions(largest_pool=64)).to_dict()
    assert config["pass_options"]["largest_pool"] == 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = ("--dataset", tmp_path / "pooled.safetensors", "--config", tmp_path / "config.json")
    place = ("--model_dir", tmp_path / "pooled.pt2", "--output_dir", tmp_path / "out")
    result = quark("quantize", *place, *data, "--hard_activations")
    assert result.exit_code == 0, result.output
    graph = load_params(
        pth_path=tmp_path / "out" / "pooled_quantized.pth", quant_mode="fx_graph_mode"
    )
    calls = [str(node.target) for node in graph.graph.nodes]
    assert sum("avg_pool2d" in call for call in calls) == 2  # 16 x 16 elements in two steps
    assert any("hardswish" in call for call in calls) and not any("silu" in c for c in calls)
    message = refused(
        "quantize", "--model_dir", tmp_path, "--quant_scheme", "int8", "--largest_pool", 4
    )
    assert "--largest_pool" in message and "for graphs" in message


def test_shift_limits_are_kept(files, quark, tmp_path):
    power_of_two = replace(INT8, scale_type="pof2")
    layer = replace(
        EVERYTHING, weight=power_of_two, input_tensors=power_of_two, output_tensors=power_of_two
    )
    bias = QuantizationSpec("int32", qscheme="per_tensor", symmetric=True, is_dynamic=False)
    config = Config(replace(layer, bias=bias), quant_mode="fx_graph_mode")
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    expected = {}
    for flags, limits in ((), None), (("--shift_limits", "cut=9:16"), ShiftLimits(cut=(9, 16))):
        output = tmp_path / f"out{len(flags)}"
        result = quark(*command(files, output, "--config", tmp_path / "config.json", *flags))
        assert result.exit_code == 0, result.output
        loaded = load_params(pth_path=output / "net_quantized.pth", quant_mode="fx_graph_mode")
        quantizer = ModelQuantizer(replace(config, shift_limits=limits))
        frozen = quantizer.freeze(quantizer.quantize_model(export(network("unet")), images()))
        with torch.no_grad():
            expected[limits] = frozen(images(1)[0])
            assert torch.equal(loaded(images(1)[0]), expected[limits])
    assert not torch.equal(*expected.values())


ENTRY = """
import torch
from tests.unit.quantization.graph_mode.networks import images, network

def unet():
    return network("unet")
def with_example():
    return network("unet"), (images(1)[0],)
def fails():
    raise OSError("no weights")
def other():
    return 3
class Branches(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x
number = 4
"""


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """A module with functions that build models, in the working directory."""
    (tmp_path / "my_nets.py").write_text(ENTRY)
    (tmp_path / "my_broken.py").write_text("import my_missing_dependency")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_nets", None)


@pytest.mark.parametrize("function", ["unet", "with_example"])
def test_a_function_builds_the_model(files, quark, entry, tmp_path, function):
    flags = ("--model_dir", f"my_nets:{function}", "--config", files / "config.json")
    flags += ("--batch_size", "2", "--trust_remote_code")
    result = quark(*command(files, tmp_path / "out", *flags))
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / f"{function}_quantized.pth"
    loaded = load_params(pth_path=path, quant_mode="fx_graph_mode")
    quantizer = ModelQuantizer(graph_config())
    expected = quantizer.freeze(quantizer.quantize_model(export(network("unet")), images()))
    with torch.no_grad():
        assert torch.equal(loaded(images(1)[0]), expected(images(1)[0]))
    assert str(tmp_path) not in sys.path


FUNCTIONS = {
    "my_nets:fails": "failed: OSError: no weights",
    "my_nets:other": "returned a int. Return an nn.Module",
    "my_nets:Branches": "my_nets.py:15, 'if x.sum() > 0:'",
    "my_nets:missing": "has no attribute 'missing'",
    "my_nets:number": "is a int. Give a function",
    "my_absent:unet": "there is no module my_absent",
    "my_broken:unet": "my_broken cannot be imported: No module named 'my_missing_dependency'",
}


@pytest.mark.parametrize(("name", "message"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_functions_that_build_no_model_are_refused(files, refused, entry, tmp_path, name, message):
    flags = ("--model_dir", name, "--config", files / "config.json", "--trust_remote_code")
    assert message in refused(*command(files, tmp_path / "out", *flags))
    assert not (tmp_path / "out").exists()


def test_no_function_runs_without_consent(files, refused, entry, tmp_path):
    flags = ("--model_dir", "my_nets:unet", "--config", files / "config.json")
    assert "--trust_remote_code" in refused(*command(files, tmp_path / "out", *flags))
    assert "my_nets" not in sys.modules


def test_an_example_is_needed(files, refused, entry, tmp_path):
    flags = ("--model_dir", "my_nets:unet", "--output_dir", tmp_path / "out")
    flags += ("--quant_scheme", "int8_wo", "--trust_remote_code")
    assert "no example arguments" in refused("quantize", *flags)
    save_file({"pixels": torch.cat(images(2))}, tmp_path / "other.safetensors")
    message = refused("quantize", *flags, "--dataset", tmp_path / "other.safetensors")
    assert "pixels do not fit the model" in message
