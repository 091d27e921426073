import json

import pytest
import torch
from safetensors.torch import save_file

from quark.torch import ModelQuantizer, load_params
from quark.torch.quantization.config.config import Config
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
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


WRONG = {
    "another file": (["--dataset", "text.txt"], "expected a .safetensors file"),
    "missing data": (["--dataset", "none.safetensors"], "none.safetensors does not exist"),
    "a flag of other models": (["--model_export", "onnx"], "does not apply to a graph"),
    "a missing graph": (["--model_dir", "none.pt2"], "none.pt2 does not exist"),
}


@pytest.mark.parametrize(("flags", "message"), WRONG.values(), ids=WRONG)
def test_wrong_flags_are_refused(files, refused, tmp_path, flags, message):
    scheme = ("--quant_scheme", "int8")
    assert message in refused(*command(files, tmp_path / "out", *scheme, *flags))
    assert not (tmp_path / "out").exists()
