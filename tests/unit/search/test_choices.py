"""Costs of formats for layers, mixtures of them, and the configurations that say so."""

from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer, collect_statistics
from quark.torch.export.writer import collect, make_format
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.report.summary import summarize
from quark.torch.search.choices import Mixture, mixed_config, rounded_as, weigh

FORMATS = {name: scheme(name) for name in ("int2_wo_32", "int3_wo_32", "uint4_wo_32", "int8_wo")}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def statistics(build, batches):
    return collect_statistics(build(), batches)


@pytest.fixture(scope="module")
def units(build, statistics):
    return weigh(build(), statistics, FORMATS)


def test_bits_are_those_of_a_checkpoint(build, units):
    for name, layer in FORMATS.items():
        config = Config(global_quant_config=layer, exclude=["lm_head"])
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build()))
        stored = collect(model, make_format(model, None, JsonExporterConfig(), "quark"))
        expected = {found.name: found.bits for found in summarize(stored, config).layers}
        assert {unit.layers[0]: unit.bits[name] for unit in units} == expected


def test_losses_are_errors_of_outputs_times_sensitivities(build, batches, statistics, units):
    model, name = build(), "model.layers.1.self_attn.o_proj"
    layer, seen = model.get_submodule(name), []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in batches:
            model(batch)
        x, weight = torch.cat(seen), layer.weight.clone()
        config = Config(layer_quant_config={name: FORMATS["int3_wo_32"]})
        ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
        error = (x @ (layer.weight - weight).T).square().sum()
    (unit,) = (unit for unit in units if unit.layers == (name,))
    expected = float(error) * statistics.sensitivities[name]
    assert unit.losses["int3_wo_32"] == pytest.approx(expected, rel=1e-4)


def test_more_bits_lose_less(units):
    for unit in units:
        losses = list(unit.losses.values())
        assert losses == sorted(losses, reverse=True)
        assert list(unit.bits.values()) == sorted(unit.bits.values())


@pytest.mark.parametrize("solved", [False, True], ids=["nearest", "solved"])
def test_weighing_leaves_no_trace(solved, build, statistics, unchanged):
    model = build()
    with unchanged(model):
        weigh(model, statistics, FORMATS, solved=solved)


def test_what_is_solved_loses_what_gptq_loses(build, statistics, units):
    """Statistics alone give the very weights of GPTQ, and so its errors."""
    solved = weigh(build(), statistics, FORMATS, solved=True)
    model, name = build(), "int3_wo_32"
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = Config(FORMATS[name], exclude=["lm_head"], algo_config=[GPTQConfig()])
    ModelQuantizer(config).quantize_model(model, statistics=statistics)
    for unit, nearest in zip(solved, units, strict=True):
        (layer,) = unit.layers
        change = model.get_parameter(f"{layer}.weight").detach() - before[f"{layer}.weight"]
        gram = statistics.inputs[statistics.readers[layer]].total
        error = float((change @ gram * change).sum())
        assert unit.losses[name] == pytest.approx(error * statistics.sensitivities[layer], rel=1e-4)
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
    together = weigh(build(), statistics, FORMATS, together=True)
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
    units = weigh(build(), statistics, FORMATS, exclude=["*down_proj"])
    names = {unit.layers[0].rpartition(".")[2] for unit in units}
    assert names == PROJECTIONS - {"down_proj"}
    config = mixed_config(build(), Mixture(units).choose(4.2), FORMATS)
    assert set(config.exclude) == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1))}
    with pytest.raises(ValueError, match="leaves no layer"):
        weigh(build(), statistics, FORMATS, exclude=["*"])


def test_a_trial_computes_as_the_frozen_model(build, units, logits, unchanged):
    model, chosen = build(), Mixture(units).choose(4.2)
    config = mixed_config(model, chosen, FORMATS)
    with unchanged(model), rounded_as(model, config):
        found = logits(model)
    frozen = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build()))
    assert torch.equal(found, logits(frozen))


def test_formats_of_inputs_are_refused(build, statistics):
    with pytest.raises(ValueError, match="ptpc_int8 quantizes more than weights"):
        weigh(build(), statistics, {"ptpc_int8": scheme("ptpc_int8")})


def test_a_format_that_does_not_fit_is_named(build, statistics, unchanged):
    model = build()
    with unchanged(model), pytest.raises(ValueError, match="group_size=128 does not divide"):
        weigh(model, statistics, {"uint4_wo_128": scheme("uint4_wo_128")})


def test_statistics_without_sensitivities_are_refused(build, statistics):
    with pytest.raises(ValueError, match="without sensitivities"):
        weigh(build(), replace(statistics, sensitivities={}), FORMATS)


def test_statistics_of_another_model_are_refused(build, statistics):
    with pytest.raises(ValueError, match="of another model"):
        weigh(build("tied"), statistics, FORMATS)


def test_experts_of_a_layer_share_a_format(build, batches, quantize):
    statistics = collect_statistics(build("mixtral", num_local_experts=4), batches)
    model = build("mixtral", num_local_experts=4)
    mixture = Mixture(weigh(model, statistics, FORMATS))
    chosen = mixture.choose(4.0)
    of_experts = [
        {chosen[n] for n in unit.layers} for unit in mixture.units if len(unit.layers) > 1
    ]
    assert [len(formats) for formats in of_experts] == [1, 1]
    quantize(model, mixed_config(model, chosen, FORMATS))
