"""Sizes of mixtures in bytes, against tensors that are written and experts that are counted."""

import itertools

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer, collect_statistics
from quark.torch.export.formats.base import get_format
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.search.costs import stored_bits
from quark.torch.search.mixtures import Mixture, measure_costs
from quark.torch.search.sizes import (
    reachable_bits,
    read_shares,
    size_of_mixture,
    size_outside,
    stored_bits_per_weight,
    stored_bytes,
)

FORMATS = {name: scheme(name) for name in ("int2_wo_32", "int4_wo_32", "int8_wo")}
EXPERTS, CHOSEN = 4, 2


@pytest.fixture(scope="module")
def experts(build, batches):
    """A model of experts with its units and statistics."""
    model = build("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    statistics = collect_statistics(model, batches)
    return model, measure_costs(model, statistics, FORMATS), statistics


def test_a_token_reads_the_experts_that_it_passes(experts):
    _, units, statistics = experts
    shares = read_shares(statistics)
    assert {shares[unit.layers[0]] for unit in units if len(unit.layers) > 1} == {CHOSEN / EXPERTS}
    assert {shares[unit.layers[0]] for unit in units if len(unit.layers) == 1} == {1.0}
    assert all(unit.share == shares[unit.layers[0]] for unit in units)


def test_what_is_outside_of_units(experts, unchanged):
    model, units, statistics = experts
    with unchanged(model):
        size = size_outside(model, statistics, units)
        left = size_outside(model, statistics, [unit for unit in units if len(unit.layers) == 1])
    inside = sum(unit.weights for unit in units)
    total = sum(p.numel() for p in model.parameters())
    assert size.stored == 4 * (total - inside)
    assert size.read == size.stored - 4 * model.get_input_embeddings().weight.numel()
    of_experts = 4 * sum(unit.weights for unit in units if len(unit.layers) > 1)
    assert left.stored - size.stored == of_experts
    assert left.read - size.read == of_experts * CHOSEN // EXPERTS


def test_a_tied_table_is_stored_once_and_read(build, batches):
    model = build("tied")
    statistics = collect_statistics(model, batches)
    size = size_outside(model, statistics, measure_costs(model, statistics, FORMATS))
    table = model.get_input_embeddings().weight
    assert size.stored == size.read and table.nbytes < size.stored < 2 * table.nbytes


def test_small_formats_go_where_they_save_most(experts):
    """Of equal losses, experts get the small format for files, and attention for tokens."""
    _, units, _ = experts
    equal = [
        unit.__class__(
            unit.layers, unit.weights, unit.bits, dict.fromkeys(unit.losses, 0.0), unit.share
        )
        for unit in units
    ]
    stored, read = Mixture(equal), Mixture(equal, per_token=True)
    assert read.weights == sum(unit.weights * unit.share for unit in units) < stored.weights
    chosen = dict.fromkeys((layer for unit in units for layer in unit.layers), "int4_wo_32")
    assert stored.cost(chosen)[0] == pytest.approx(read.cost(chosen)[0])  # all weights alike
    experts_small = {
        name: "int2_wo_32" if "experts" in name else fmt for name, fmt in chosen.items()
    }
    assert stored.cost(experts_small)[0] < read.cost(experts_small)[0]


@pytest.mark.parametrize("bits", [3.2, 4.0, 6.0])
def test_mixtures_for_a_size_per_token_are_the_best(bits, experts):
    model, every, statistics = experts
    units = [*every[3:6], *every[-2:]]  # some of experts, some not
    assert len({unit.share for unit in units}) == 2
    mixture = Mixture(units, per_token=True)
    tried = [
        mixture.cost(
            {n: name for unit, name in zip(units, names, strict=True) for n in unit.layers}
        )
        for names in itertools.product(FORMATS, repeat=len(units))
    ]
    chosen = mixture.choose(bits)
    used, loss = mixture.cost(chosen)
    assert used <= bits
    assert loss == pytest.approx(min(found for size, found in tried if size <= bits))
    outside = size_outside(model, statistics, units)
    read = size_of_mixture(units, chosen, outside).read
    assert read == pytest.approx(outside.read + used * mixture.weights / 8, abs=1)


@pytest.mark.parametrize(
    "name", ["int3_wo_32", "uint4_wo_32", "int8_wo", "fp8", "mxfp4", "nvfp4", "mx6", "iq4_nl"]
)
def test_stored_bits_are_those_of_the_written_tensors(name, build):
    model = ModelQuantizer(LLMTemplate.get("llama").get_config(name)).quantize_model(
        build(), [torch.arange(8)[None]]
    )
    fmt = get_format("quark", Config(), JsonExporterConfig())
    for _, layer in quantized_layers(ModelQuantizer.freeze(model)):
        stored = fmt.layer_tensors(layer, {})
        bits = sum(8 * t.nbytes for part, t in stored.items() if part.startswith("weight"))
        assert stored_bits(layer.quant_config, tuple(layer.weight.shape)) == bits


@pytest.mark.parametrize("name", ["int2_wo_64", "int3_wo_32", "uint4_wo_32", "int8_wo"])
def test_sizes_of_a_model_whose_weights_have_inputs_first(name, build, batches):
    """Codes and zero points are packed along other axes of such a weight, and padded to words."""
    model = build("gpt2", n_embd=64, n_head=2, n_positions=32)
    units = measure_costs(model, collect_statistics(model, batches), {name: scheme(name)})
    assert reachable_bits(model, {name: scheme(name)}) == (
        min(unit.bits[name] / unit.weights for unit in units),
        max(unit.bits[name] / unit.weights for unit in units),
    )
    template = LLMTemplate.get("gpt2").get_config(name)
    fmt = get_format("quark", Config(), JsonExporterConfig())
    frozen = ModelQuantizer.freeze(ModelQuantizer(template).quantize_model(model))
    written = {
        layer: sum(8 * t.nbytes for part, t in tensors.items() if part.startswith("weight"))
        for layer, module in quantized_layers(frozen)
        for tensors in [fmt.layer_tensors(module, {})]
    }
    assert {unit.layers[0]: unit.bits[name] for unit in units} == written


def test_reach_is_that_of_the_smallest_and_the_largest_layer(build, batches):
    model = build()
    units = measure_costs(model, collect_statistics(model, batches), FORMATS)
    bits = [count / unit.weights for unit in units for count in unit.bits.values()]
    assert reachable_bits(model, FORMATS) == (min(bits), max(bits))
    with pytest.raises(ValueError, match="None of int4_wo_128 fits a layer"):
        reachable_bits(model, {"int4_wo_128": scheme("int4_wo_128")})


def test_a_tied_table_counts_once(build):
    model = build("tied")
    assert stored_bytes(model) == sum(p.nbytes for p in model.parameters())


def test_bits_per_weight_of_the_files(experts):
    """Shares of tokens do not count, in contrast to the size that a search may limit."""
    _, units, _ = experts
    layers = [layer for unit in units for layer in unit.layers]
    chosen = {name: "int2_wo_32" if "experts" in name else "int8_wo" for name in layers}
    expected, _ = Mixture(units).cost(chosen)
    assert stored_bits_per_weight(units, chosen) == pytest.approx(expected)
    assert Mixture(units, per_token=True).cost(chosen)[0] > expected + 0.1
