"""Every recipe names a scheme and algorithms that are there and serve it."""

import pytest

from quark.torch import LLMTemplate
from quark.torch.quantization.algorithms import find_algorithms
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.recipes import RECIPES, recipe


@pytest.mark.parametrize("name", RECIPES)
def test_algorithms_serve_the_scheme(name):
    config = LLMTemplate.get("llama").get_recipe(name)
    assert config.global_quant_config == scheme(RECIPES[name][0])
    assert config.exclude == ["lm_head"]
    for algorithm, options in find_algorithms(config):
        algorithm.check(options, {"layer": config.global_quant_config})


def test_options_are_new_each_time():
    first, second = (recipe("w4")[1][0] for _ in range(2))
    assert first == second
    assert first is not second


def test_an_unknown_name():
    with pytest.raises(ValueError, match="w4"):
        recipe("w5")
