"""A user's type checker sees real signatures: right calls pass, and each wrong one is an error."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quark

ROOT = Path(quark.__file__).parents[1]

# Every line with a mistake ends in the code of the error that mypy is to report, and no other does.
SCRIPT = """
from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import quark.torch.export
from quark.torch import LLMTemplate, ModelExporter, ModelImporter, ModelQuantizer, QuantFlow
from quark.torch import ModelExporterr  # attr-defined
from quark.torch.export import ExporterConfig, JsonExporterConfig, export_gguf, save_params
from quark.torch.export import export_tensorrt  # attr-defined
from quark.torch.quantization import AWQConfig, Config, Int4PerGroupSpec, QConfig
from quark.torch.quantization import QuantizationConfig, QuantizationSpec, ScaleQuantSpec
from quark.torch.quantization import Int7PerGroupSpec  # attr-defined
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, OCP_MXFP4Spec
from quark.torch.quantization.config.config import QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType
from quark.torch.quantization.nn.operators import QuantLinear

weight = Int4PerGroupSpec(ch_axis=-1, group_size=128).to_quantization_spec()
assert_type(weight, QuantizationSpec)
Int4PerGroupSpec(ch_axis=-1)  # call-arg
Int4PerGroupSpec(ch_axis=-1, group_sise=128)  # call-arg
Int4PerGroupSpec(ch_axis="last", group_size=128)  # arg-type
FP8E4M3PerTensorSpec("min_max", is_dynamic=False)
FP8E4M3PerTensorSpec(is_dynamic="no")  # arg-type
FP8E4M3PerTensorSpec(round_method=RoundType.half_even)
OCP_MXFP4Spec(ch_axis=-1, scale_calculation_mode="even")
OCP_MXFP4Spec(ch_axis=-1, group_size=32)  # call-arg
stages = ScaleQuantSpec(OCP_MXFP4Spec(ch_axis=-1), weight).to_quantization_spec()
assert_type(stages, list[QuantizationSpec])
QTensorConfig(dtype=Dtype.int8, qscheme=QSchemeType.per_tensor)
QTensorConfig(dtype=Dtype.int8, qsheme=QSchemeType.per_tensor)  # call-arg
QuantizationConfig(weight=stages)
QuantizationConfig(weight=OCP_MXFP4Spec(ch_axis=-1))  # arg-type
config = Config(global_quant_config=QuantizationConfig(weight=weight), algo_config=[AWQConfig()])
QConfig(global_quant_config=weight)  # arg-type
QuantizationConfig(weigth=weight)  # call-arg

model: nn.Module = nn.Linear(8, 8)
quantizer = ModelQuantizer(config)
model = quantizer.quantize_model(model, [torch.zeros(1, 8)])
quantizer.quantize_model()  # call-arg
exporter = ModelExporter("OUT")
options = ExporterConfig(JsonExporterConfig(weight_format="real_quantized"))
ModelExporter(config=options, export_dir="OUT")
ModelExporter(export_directory="OUT")  # call-arg
exporter.export_safetensors_model(model, config, custom_mode="awq")
exporter.export_safetensors_model(model, mode="awq")  # call-arg
exporter.export_safe_tensors_model(model)  # attr-defined
assert_type(ModelImporter("OUT", saved_format="safetensors").import_model_info(model), nn.Module)
ModelImporter(3)  # arg-type
quark.torch.export.convert("IN", "OUT", "gguf")
layer = QuantLinear.from_float(model, QuantizationConfig(weight=weight))
QuantLinear.from_float(model, config)  # arg-type
flow: QuantFlow = QuantFlow.standard
LLMTemplate.get(3)  # arg-type
export_gguf(model, Path("OUT"))  # call-arg
"""


SETTINGS = """
[mypy]
strict = True
follow_imports = silent
mypy_path = {root}

[mypy-torch.*,transformers.*,safetensors.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(line, code) of each error that mypy reports on the script."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    (folder / "user.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "mypy.ini").write_text(SETTINGS.format(root=ROOT.as_posix()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "user.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    errors = re.findall(r"^user\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M)
    assert errors, done.stdout + done.stderr
    return {(int(line), code) for line, code in errors}


def test_exactly_the_mistakes_are_errors(reported):
    marks = [re.search(r"  # ([a-z-]+)$", line) for line in SCRIPT.splitlines()]
    expected = {(number, mark[1]) for number, mark in enumerate(marks, 1) if mark}
    assert reported == expected


def test_the_package_says_that_it_has_types():
    assert (Path(quark.__file__).parent / "py.typed").is_file()
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[tool.hatch.build.targets.wheel]\npackages = ["quark"]\n' in settings  # every file
