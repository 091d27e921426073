"""Times of layers in formats, and the mixtures within a time, against all mixtures."""

import itertools

import pytest
import torch

from quark.torch import collect_statistics
from quark.torch.quantization.config.presets import scheme
from quark.torch.search.mixtures import measure_costs
from quark.torch.search.times import (
    _packed_layer,
    _Shape,
    choose_within_time,
    measure_times,
    time_of,
)

FORMATS = {name: scheme(name) for name in ("int2_wo_32", "int4_wo_32", "int8_wo")}
EXPERTS, CHOSEN = 4, 2


@pytest.fixture(scope="module")
def experts(build, batches):
    """A model of experts with its units."""
    model = build("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    return model, measure_costs(model, collect_statistics(model, batches), FORMATS)


def test_every_layer_has_a_time_in_every_format(experts, unchanged):
    model, units = experts
    with unchanged(model):
        seconds = measure_times(model, FORMATS, runtime="exact")
    assert seconds.keys() == FORMATS.keys()
    for of_layer in seconds.values():
        assert of_layer.keys() >= {name for unit in units for name in unit.layers}
        assert all(value > 0 for value in of_layer.values())
        assert not any("lm_head" in name for name in of_layer)


def test_layers_that_a_format_does_not_fit_have_no_time(build):
    seconds = measure_times(build(), {"int4_wo_48": scheme("int4_wo_32"), "odd": odd()}, ["*mlp*"])
    assert seconds["odd"] == {} and seconds["int4_wo_48"]
    assert not any("mlp" in name for name in seconds["int4_wo_48"])


def odd():
    return scheme("int4_wo_128")  # the layers of the small model have fewer inputs


def test_a_runtime_that_is_unknown(build):
    with pytest.raises(ValueError, match=r"runtime='slow' is unknown"):
        measure_times(build(), FORMATS, runtime="slow")


@pytest.mark.parametrize("name", ["w_int8_a_int8_per_tensor_sym", "mxfp4", "nvfp4", "int3_wo_32"])
@pytest.mark.parametrize("runtime", ["exact", "fast"])
def test_the_layer_that_is_timed_computes_in_the_runtime(name, runtime):
    layer = _packed_layer(_Shape(64, 128, torch.bfloat16), scheme(name), runtime, "cpu")[0]
    assert layer.runtime == runtime
    assert layer(torch.randn(1, 128, dtype=torch.bfloat16)).shape == (1, 64)


def test_the_choice_is_the_best_of_all_mixtures(experts):
    """Times are given, not measured: the best of all mixtures within them is found by hand."""
    _, units = experts
    units = units[:4]
    per_format = {"int2_wo_32": 3e-3, "int4_wo_32": 1e-3, "int8_wo": 2e-3}
    seconds = {
        name: {layer: value * (1 + i) for i, unit in enumerate(units) for layer in unit.layers}
        for name, value in per_format.items()
    }
    every = [
        {layer: name for unit, name in zip(units, names, strict=True) for layer in unit.layers}
        for names in itertools.product(FORMATS, repeat=len(units))
    ]

    def loss(chosen):
        return sum(unit.losses[chosen[unit.layers[0]]] for unit in units)

    for budget in (0.012, 0.015, 0.02, 0.05):
        chosen = choose_within_time(units, seconds, budget)
        assert time_of(units, seconds, chosen) <= budget
        fitting = [other for other in every if time_of(units, seconds, other) <= budget]
        assert loss(chosen) == min(map(loss, fitting))
    with pytest.raises(ValueError, match=r"9 ms are less than 10 ms, the time of a token"):
        choose_within_time(units, seconds, 0.009)


def test_experts_count_by_their_share(experts):
    _, units = experts
    [unit, *_] = [unit for unit in units if len(unit.layers) > 1]
    seconds = {name: dict.fromkeys(unit.layers, 1.0) for name in FORMATS}
    chosen = dict.fromkeys(unit.layers, "int8_wo")
    assert time_of([unit], seconds, chosen) == pytest.approx(len(unit.layers) * CHOSEN / EXPERTS)
