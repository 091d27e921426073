"""Every scheme, recipe and algorithm gives the same files for a model that is read in parts."""

import pytest
import torch

from quark.torch import ModelExporter, ModelQuantizer
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme, scheme_names
from quark.torch.quantization.config.recipes import RECIPES, recipe
from tests.models import test_streamed
from tests.models.architectures import build, small_config
from tests.models.test_streamed import contents, in_memory, streamed

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 1}
QUICK = ("int4_fp8", "mxfp6_e3m2", "bfp16")
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("schemes") / "model"
    build(small_config("llama", **SIZES), torch.bfloat16).save_pretrained(path)
    return path


def check(name, algorithms, source, batches, tmp_path):
    files = []
    for load in (in_memory, streamed):
        config = Config(scheme(name, 32), exclude=["lm_head"], algo_config=algorithms or None)
        model = ModelQuantizer(config).quantize_model(load(source), batches)
        place = tmp_path / load.__name__
        ModelExporter(None, place).export_safetensors_model(ModelQuantizer.freeze(model))
        files.append(contents(place))
    assert files[0] == files[1]


def test_every_algorithm_has_a_case():
    cases = {options.name for case in test_streamed.ALGORITHMS.values() for options in case}
    assert cases | {"quarot"} == set(ALGORITHMS)  # another name of rotation


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else NIGHTLY) for n in scheme_names()]
)
def test_schemes(name, source, batches, tmp_path):
    check(name, [], source, batches, tmp_path)


@NIGHTLY
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, source, batches, tmp_path):
    layers, algorithms = recipe(name)
    check(layers, algorithms, source, batches, tmp_path)
