"""Costs of formats for layers, mixtures of them, and the configurations that say so."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import summarize
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.search.mixtures import Mixture, measure_costs, mixed_config, temporarily_quantized

FORMATS = {name: scheme(name) for name in ("int2_wo_32", "int3_wo_32", "uint4_wo_32", "int8_wo")}
INPUTS = ("ptpc_int8", "int8", "fp8", "mxfp4", "nvfp4", "mx6", "int4_wa_32", "mxfp4_fp8")
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def statistics(build, batches):
    return collect_statistics(build(), batches)


@pytest.fixture(scope="module")
def units(build, statistics):
    return measure_costs(build(), statistics, FORMATS)


def test_bits_are_those_of_a_checkpoint(build, units):
    for name, layer in FORMATS.items():
        config = Config(global_quant_config=layer, exclude=["lm_head"])
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build()))
        stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
        expected = {found.name: found.bits for found in summarize(stored, config).layers}
        assert {unit.layers[0]: unit.bits[name] for unit in units} == expected


def error_of(name, layer, model, batches):
    """Squared error of the outputs of one quantized layer, where it stands in the float model."""
    seen = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            model(batch)
        x = torch.cat([part.flatten(0, -2) for part in seen])
        before = model.get_submodule(name)(x)
        config = Config(layer_quant_config={name: layer})
        ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
        return float((model.get_submodule(name)(x) - before).square().sum())


@pytest.mark.parametrize("fmt", ["int3_wo_32", "bfloat16", *INPUTS])
@pytest.mark.parametrize("model", ["llama", "opt", "gpt2"])
@pytest.mark.sampled(3)
def test_losses_are_those_of_the_errors_of_outputs(fmt, model, build, batches):
    statistics, layer = collect_statistics(build(model), batches), scheme(fmt)
    names = {"llama": ["1.mlp.down_proj"], "opt": ["0.fc2"], "gpt2": ["1.attn.c_attn"]}[model]
    units = measure_costs(build(model), statistics, {fmt: layer})
    (unit,) = (unit for unit in units if unit.layers[0].endswith(tuple(names)))
    (name,) = unit.layers
    expected = statistics.loss(name, error_of(name, layer, build(model), batches))
    assert expected > 0
    assert unit.losses[fmt] == pytest.approx(expected, rel=1e-3)


def test_losses_lie_on_a_power_law_between_both_probes(statistics):
    name, coarse = next(iter(statistics.probes.items()))
    fine = statistics.fine_probes[name]
    assert fine.error < coarse.error and fine.divergence < coarse.divergence
    ends = [probe.divergence / probe.tokens for probe in (fine, coarse)]
    for probe, loss in zip((fine, coarse), ends, strict=True):
        assert statistics.loss(name, probe.error) == pytest.approx(loss)
    middle = math.sqrt(fine.error * coarse.error)
    assert statistics.loss(name, middle) == pytest.approx(math.sqrt(ends[0] * ends[1]))
    assert statistics.loss(name, fine.error / 8) == pytest.approx(ends[0] / 8)
    assert statistics.loss(name, 8 * coarse.error) == pytest.approx(8 * ends[1])
    assert statistics.loss(name, 0.0) == 0.0


def test_some_tokens_stand_for_all(build, monkeypatch):
    """What rounding inputs adds is scaled to all tokens; what weights cost is of all of them."""
    data = torch.randint(3, 64, (40, 32)).split(8)
    formats = {name: scheme(name) for name in ("int4_wa_32", "ptpc_int8")}
    whole, part = (
        (
            monkeypatch.setattr("quark.torch.statistics.collection.TOKENS", size),
            measure_costs(build(), collect_statistics(build(), data, probes=1), formats),
        )[1]
        for size in (2000, 200)
    )
    for one, other in zip(part, whole, strict=True):
        assert one.losses != other.losses
        assert one.losses == pytest.approx(other.losses, rel=0.15)


def test_more_bits_lose_less(units):
    for unit in units:
        losses = list(unit.losses.values())
        assert losses == sorted(losses, reverse=True)
        assert list(unit.bits.values()) == sorted(unit.bits.values())


@pytest.mark.parametrize("solved", [False, True], ids=["nearest", "solved"])
def test_weighing_leaves_no_trace(solved, build, statistics, unchanged):
    model = build()
    with unchanged(model):
        measure_costs(model, statistics, FORMATS, solved=solved)


def test_what_is_solved_loses_what_gptq_loses(build, statistics, units):
    """Statistics alone give the very weights of GPTQ, and so its errors."""
    solved = measure_costs(build(), statistics, FORMATS, solved=True)
    model, name = build(), "int3_wo_32"
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = Config(FORMATS[name], exclude=["lm_head"], algo_config=[GPTQConfig()])
    ModelQuantizer(config).quantize_model(model, statistics=statistics)
    for unit, nearest in zip(solved, units, strict=True):
        (layer,) = unit.layers
        change = model.get_parameter(f"{layer}.weight").detach() - before[f"{layer}.weight"]
        gram = statistics.inputs[statistics.readers[layer]].total
        error = float((change @ gram * change).sum())
        assert unit.losses[name] == pytest.approx(statistics.loss(layer, error), rel=1e-4)
        assert unit.losses[name] < nearest.losses[name]
        assert unit.bits == nearest.bits


def test_a_mixture_is_no_worse_than_one_format(units):
    mixture = Mixture(units)
    for bits, loss in mixture.uniform().values():
        size, found = mixture.cost(mixture.choose(bits))
        assert size <= bits
        assert found <= loss


def test_the_largest_budget_takes_the_best(units):
    assert set(Mixture(units).choose(100).values()) == {"int8_wo"}


def test_too_small_a_budget_is_an_error(units):
    with pytest.raises(ValueError, match=r"2 bits per weight are less than 3\.063,"):
        Mixture(units).choose(2)


def test_layers_that_read_the_same_get_one_format(build, statistics):
    together = measure_costs(build(), statistics, FORMATS, share_formats=True)
    ends = [{name.rpartition(".")[2] for name in unit.layers} for unit in together]
    block = [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]
    assert ends == block * 2
    mixture = Mixture(together)
    chosen = mixture.choose(4.0)
    for unit in together:
        assert len({chosen[name] for name in unit.layers}) == 1


def test_the_configuration_quantizes_just_as_chosen(build, units):
    chosen = Mixture(units).choose(4.2)
    assert len(set(chosen.values())) > 1
    model = build()
    config = Config.from_dict(mixed_config(model, chosen, FORMATS).to_dict(everything=True))
    ModelQuantizer(config).quantize_model(model)
    found = {n: m.quant_config for n, m in model.named_modules() if hasattr(m, "quant_config")}
    found = {n: c for n, c in found.items() if not isinstance(c, Config)}
    assert found == {name: FORMATS[fmt] for name, fmt in chosen.items()}


def test_excluded_layers_stay(build, statistics):
    units = measure_costs(build(), statistics, FORMATS, exclude=["*down_proj"])
    names = {unit.layers[0].rpartition(".")[2] for unit in units}
    assert names == PROJECTIONS - {"down_proj"}
    config = mixed_config(build(), Mixture(units).choose(4.2), FORMATS)
    assert set(config.exclude) == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))}
    with pytest.raises(ValueError, match="leaves no layer"):
        measure_costs(build(), statistics, FORMATS, exclude=["*"])


@pytest.mark.parametrize("names", [tuple(FORMATS), ("int8", "mxfp4")], ids=["weights", "inputs"])
def test_a_trial_computes_as_the_frozen_model(names, build, statistics, batches, logits, unchanged):
    model, formats = build(), {name: scheme(name) for name in names}
    chosen = Mixture(measure_costs(model, statistics, formats)).choose(6)
    assert len(set(chosen.values())) > 1
    config = mixed_config(model, chosen, formats)
    with unchanged(model), temporarily_quantized(model, config, statistics):
        found = logits(model)
    frozen = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build(), batches))
    assert torch.equal(found, logits(frozen))


WEIGHT, STATIC = scheme("int8").weight, scheme("int8").input_tensors
MOVING = replace(STATIC, observer_cls="MovingAverageMinMaxObserver")
UNKNOWN = {
    "outputs": (scheme("w_fp8_a_fp8_o_fp8"), "quantizes .*output_tensors"),
    "bias": (QuantizationConfig(weight=WEIGHT, bias=WEIGHT), "quantizes .*bias"),
    "inputs alone": (QuantizationConfig(input_tensors=STATIC), "quantizes input_tensors"),
    "order of data": (QuantizationConfig(weight=WEIGHT, input_tensors=MOVING), "static ranges"),
}


@pytest.mark.parametrize(("layer", "said"), UNKNOWN.values(), ids=UNKNOWN)
def test_formats_whose_cost_is_not_told_are_refused(layer, said, build, statistics):
    with pytest.raises(ValueError, match=f"other .*{said}"):
        measure_costs(build(), statistics, {"other": layer})


MISFITS = {name: scheme(name) for name in ("int2_wo_32", "int4_wo_64", "uint4_wo_128", "int8_wo")}


@pytest.fixture
def fitting(build, statistics):
    """Units of a model that groups of 64 fit but for down projections, and those of 128 nowhere."""
    return measure_costs(build(), statistics, MISFITS)


def test_formats_that_do_not_fit_are_left_out(build, statistics, caplog):
    fitting = measure_costs(build(), statistics, MISFITS)
    for unit in fitting:
        ends = "down_proj" in unit.layers[0]
        expected = {"int2_wo_32", "int8_wo"} if ends else {"int2_wo_32", "int4_wo_64", "int8_wo"}
        assert set(unit.bits) == set(unit.losses) == expected
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == [
        "int4_wo_64 is left out for 2 layers",
        "uint4_wo_128 is left out for 14 layers",
    ]
    assert set(Mixture(fitting).uniform()) == {"int2_wo_32", "int8_wo"}


@pytest.mark.parametrize("bits", [3.1, 4.0, 5.5, 7.0, 9.0])
def test_mixtures_of_what_fits_are_the_best(bits, fitting):
    units = fitting[4:10]  # two have one format less
    assert len({len(unit.bits) for unit in units}) == 2
    mixture = Mixture(units)
    tried = [
        mixture.cost({unit.layers[0]: name for unit, name in zip(units, names, strict=True)})
        for names in itertools.product(*(unit.bits for unit in units))
    ]
    size, loss = mixture.cost(mixture.choose(bits))
    assert size <= bits
    assert loss == pytest.approx(min(found for used, found in tried if used <= bits))


def test_mixtures_of_what_fits_are_quantized(build, fitting):
    chosen = Mixture(fitting).choose(5.0)
    assert "int4_wo_64" in chosen.values()
    ModelQuantizer(mixed_config(build(), chosen, MISFITS)).quantize_model(build())


def test_a_layer_that_no_format_fits_is_named(build, statistics, unchanged):
    model, formats = build(), {name: scheme(name) for name in ("int4_wo_64", "uint4_wo_128")}
    said = "None of the formats fits model.layers.0.mlp.down_proj.*=64 does not.*=128 does not"
    with unchanged(model), pytest.raises(ValueError, match=said):
        measure_costs(model, statistics, formats)


def test_statistics_without_sensitivities_are_refused(build, statistics):
    with pytest.raises(ValueError, match="without sensitivities"):
        measure_costs(build(), replace(statistics, probes={}), FORMATS)


def test_statistics_of_another_model_are_refused(build, statistics):
    with pytest.raises(ValueError, match="of another model"):
        measure_costs(build("tied"), statistics, FORMATS)


def test_experts_of_a_layer_share_a_format(build, batches, quantize):
    statistics = collect_statistics(build("mixtral", num_local_experts=4), batches)
    model = build("mixtral", num_local_experts=4)
    mixture = Mixture(measure_costs(model, statistics, FORMATS))
    chosen = mixture.choose(4.0)
    of_experts = [
        {chosen[n] for n in unit.layers} for unit in mixture.units if len(unit.layers) > 1
    ]
    assert [len(formats) for formats in of_experts] == [1, 1]
    quantize(model, mixed_config(model, chosen, FORMATS))
