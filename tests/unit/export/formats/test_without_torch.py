"""Headers and configurations of checkpoints are understood without torch."""

import json
import subprocess
import sys

import pytest

from quark.torch import ModelExporter
from quark.torch.export.formats.registry import FORMATS
from quark.torch.export.recognition import read_contents
from quark.torch.quantization.config.presets import scheme
from tests.configurations import config, groups, preset

# Checkpoint format -> configuration of a model that it holds.
CASES = {
    "quark": preset("int4_wo_32"),
    "awq": config(groups("int4")),
    "gptq": config(groups("uint4", False)),
    "compressed-tensors": preset("w_int4_per_group_a_int8_per_token_dynamic"),
    "fp8": preset("fp8"),
    "modelopt": preset("nvfp4"),
    "mxfp8": preset("mxfp8"),
    "torchao": preset("ptpc_int8"),
    "mlx": config(groups("int4"), layer_quant_config={"*embed_tokens": scheme("int8_wo_32")}),
}
# Reads what checkpoints hold, in a process that imports only what this takes.
CONTENTS = """
import json, pathlib, sys
from quark.torch.export.containers.recognition import recognize_container
for path in map(pathlib.Path, sys.argv[1:]):
    contents = recognize_container(path).contents(path)
    print(json.dumps([contents.note, contents.summary.to_dict(), "torch" in sys.modules]))
"""


@pytest.fixture
def paths(build, quantize, tmp_path):
    """A checkpoint of each format."""
    for mode, configuration in CASES.items():
        model = quantize(build(), configuration)
        ModelExporter(tmp_path / mode).export_safetensors_model(model, custom_mode=mode)
    return [tmp_path / mode for mode in CASES]


def test_headers_are_understood_without_torch(paths):
    done = subprocess.run(
        [sys.executable, "-c", CONTENTS, *paths], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    for path, line in zip(paths, lines, strict=True):
        note, summary, has_torch = json.loads(line)
        assert (note, has_torch) == ("", False), path
        assert summary["layers"]
        assert summary == json.loads(json.dumps(read_contents(path).summary.to_dict()))


def test_every_format_is_here_but_one():
    """Mxfp4 holds experts of other models."""
    assert FORMATS.keys() - CASES.keys() == {"mxfp4"}
