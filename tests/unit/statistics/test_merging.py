"""Statistics of parts of the data, merged, against those of all of it."""

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from quark.torch import (
    ModelQuantizer,
    collect_statistics,
    load_statistics,
    merge_statistics,
    save_statistics,
)
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.statistics import collection, merging

ROWS = torch.randint(3, 64, (8, 40), generator=torch.Generator().manual_seed(4))
# Parts begin with other lengths, so that chunks end where parts do.
BATCHES = [row[:, :-4] if index in (1, 2, 3) else row for index, row in enumerate(ROWS.split(1))]
PARTS = (BATCHES[:1], BATCHES[1:4], BATCHES[4:])
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 1}


@pytest.fixture(scope="module")
def collected(build):
    """Statistics of parts of the data, and of all of it, by the name of the model."""

    def collected(name):
        makes = MIXTURE if name == "mixtral" else {}
        model = build(name, **makes)
        parts = [collect_statistics(model, part, probes=8) for part in PARTS]
        return parts, collect_statistics(model, BATCHES, probes=8)

    return cache(collected)


def same_ranges(found, expected):
    for layer, tensor in product(expected.readers, ("input_tensors", "output_tensors")):
        other, kept = (given.range_of(layer, tensor) for given in (found, expected))
        if kept.is_empty:
            assert other.is_empty
            continue
        assert torch.equal(other.channels.lo, kept.channels.lo)
        assert torch.equal(other.channels.hi, kept.channels.hi)
        assert torch.equal(other.histogram.counts, kept.histogram.counts)
        assert other.histogram.limit == kept.histogram.limit


def same_sums(found, expected, share=0.0):
    assert list(found.readers) == list(expected.readers)
    for layer in expected.readers:
        kept, other = (given.inputs[given.first_reader(layer)] for given in (expected, found))
        assert found.tokens[found.first_reader(layer)] == other.tokens == kept.tokens
        if kept.total is None:
            assert other.total is None
            continue
        for one, two in ((other.total, kept.total), (other.magnitude, kept.magnitude)):
            assert float((one - two).norm()) <= share * float(two.norm())


def same_losses(found, expected):
    """Divergences follow from ratios in each part."""
    for probes, others, share in (
        (found.probes, expected.probes, 0.01),
        (found.fine_probes, expected.fine_probes, 0.1),
    ):
        assert probes.keys() == others.keys() != set()
        for name, probe in probes.items():
            assert probe.tokens == others[name].tokens
            assert probe.error == pytest.approx(others[name].error, rel=1e-5)
            assert probe.divergence == pytest.approx(others[name].divergence, rel=share)
            assert probe.divergence > 0


def rows_of(tokens):
    return sorted(map(tuple, tokens.tolist()))


@pytest.mark.parametrize("name", ["llama", "opt", "mixtral"])
@pytest.mark.sampled(2)
def test_parts_are_merged_to_the_whole(name, collected):
    parts, whole = collected(name)
    merged = merge_statistics(parts)
    assert (merged.model, merged.units) == (whole.model, whole.units)
    same_sums(merged, whole, 1e-6)
    same_ranges(merged, whole)
    for layer in whole.readers:  # tokens are few enough to be kept, in whatever order
        assert rows_of(merged.sample(layer)) == rows_of(whole.sample(layer))
    same_losses(merged, whole)


def test_layers_that_read_the_same_do_so_if_any_part_tells():
    """Experts are seen to share their inputs only where the data reaches them."""
    told = (
        {"a": "a", "b": "a", "c": "c"},
        {"a": "a", "b": "b", "c": "b"},
        {n: n for n in "abc"},
    )
    assert merging._merge_readers(
        [SimpleNamespace(readers=readers) for readers in told]
    ) == dict.fromkeys("abc", "a")


def test_experts_have_the_tokens_of_parts_that_reached_them(build):
    model = build("mixtral", **MIXTURE)
    parts = [collect_statistics(model, [torch.full((1, 2), token)]) for token in (5, 9)]
    merged = merge_statistics(parts)
    saw = {
        n: [p for p in parts if p.tokens[p.first_reader(n)]]
        for n in merged.readers
        if "experts" in n
    }
    assert {len(found) for found in saw.values()} == {0, 1, 2}
    for name, found in saw.items():
        gram = merged.inputs[merged.first_reader(name)]
        assert gram.tokens == 2 * len(found)
        assert (gram.total is None) == (merged.sample(name) is None) == (not found)
        assert merged.range_of(name, "input_tensors").is_empty == (not found)
        if len(found) == 1:
            (part,) = found
            assert torch.equal(gram.total, part.inputs[part.first_reader(name)].total)


def quantized(model, config, statistics):
    model = ModelQuantizer(config).quantize_model(model, statistics=statistics)
    return ModelQuantizer.freeze(model).state_dict()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.sampled(2)
def test_gptq_does_the_same(name, collected, build, config_of):
    parts, whole = collected(name)
    config = config_of("int4_wo_32", algo_config=[GPTQConfig()])
    makes = MIXTURE if name == "mixtral" else {}
    expected = quantized(build(name, **makes), config, whole)
    found = quantized(build(name, **makes), config, merge_statistics(parts))
    # A sum in another order may turn a tie, and codes after it; another Gram turns nine of ten.
    for key, tensor in expected.items():
        same = torch.isclose(found[key], tensor, rtol=1e-4, atol=1e-5)
        assert same.float().mean() > 0.95, key


def test_static_ranges_are_the_same_bits(collected, build, config_of):
    parts, whole = collected("llama")
    expected = quantized(build(), config_of("int8"), whole)
    found = quantized(build(), config_of("int8"), merge_statistics(parts))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_the_order_of_parts_is_of_no_consequence(collected):
    parts, _ = collected("llama")
    one, other = merge_statistics(parts), merge_statistics(reversed(parts))
    assert one.data == other.data
    assert one.probes == other.probes
    same_sums(one, other)
    for name, tokens in one.samples.items():
        assert torch.equal(tokens, other.samples[name])


def test_parts_on_disk_give_the_same_and_the_result_is_kept(collected, tmp_path):
    parts, _ = collected("mixtral")
    for number, part in enumerate(parts):
        save_statistics(part, tmp_path / str(number))
    stored = [load_statistics(tmp_path / str(number)) for number in range(len(parts))]
    expected, merged = merge_statistics(parts), merge_statistics(stored)
    save_statistics(merged, tmp_path / "merged")
    found = load_statistics(tmp_path / "merged")
    assert (found.data, found.probes) == (expected.data, expected.probes)
    assert found.fine_probes == expected.fine_probes != {}
    same_sums(found, expected)
    same_ranges(found, expected)


def test_what_was_merged_can_be_merged_again(collected):
    parts, whole = collected("mixtral")
    merged = merge_statistics([merge_statistics(parts[:2]), parts[2]])
    same_sums(merged, whole, 1e-6)
    same_ranges(merged, whole)
    same_losses(merged, whole)


def test_probes_that_a_part_lacks_are_left_out(collected):
    """Statistics of earlier versions have no probes at four bits."""
    (first, *others), _ = collected("llama")
    merged = merge_statistics([replace(first, fine_probes={}), *others])
    assert merged.fine_probes == {}
    assert merged.probes == merge_statistics([first, *others]).probes


def test_one_part_is_the_whole(collected):
    (part, *_), _ = collected("llama")
    assert merge_statistics([part]) is part


def test_parts_are_left_as_they_are(collected):
    parts, _ = collected("llama")
    before = [{n: gram.total.clone() for n, gram in part.inputs.items()} for part in parts]
    merge_statistics(parts)
    for part, totals in zip(parts, before, strict=True):
        assert all(torch.equal(part.inputs[n].total, total) for n, total in totals.items())


def test_each_part_gives_its_share_of_tokens(build, monkeypatch):
    for module in (collection, merging):
        monkeypatch.setattr(module, "TOKENS", 16)
    parts = [collect_statistics(build(), part, probes=0) for part in (BATCHES[:1], BATCHES[1:])]
    for number, part in enumerate(parts):
        for token in part.samples.values():
            token[:] = torch.arange(len(token)).unsqueeze(1) + 100 * number
    for tokens in merge_statistics(parts).samples.values():
        found = tokens[:, 0].unique()
        assert [int((found < 100).sum()), int((found >= 100).sum())] == [2, 14]  # of 40 and 280


def other_units(part):
    (first, second, *rest) = part.units
    return replace(part, units=(first + second, *rest))


REFUSED = {
    "models": (
        lambda p: replace(p, model={**p.model, "x": "1"}),
        "1 and 2 differ in 1 tensors of the model, such as x: merge",
    ),
    "units": (other_units, "1 and 2 differ in 1 units"),
    "layers": (
        lambda p: replace(p, units=p.units[1:]),
        "differ in 1 units of layers, such as model.layers",
    ),
    "probes": (lambda p: replace(p, probes={}), "1 and 2 has sensitivities"),
    "data": (lambda p: replace(p, data="same"), "2 and 3 are of the same data"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_parts_that_do_not_belong_together_are_refused_first(change, said, collected):
    parts = [replace(part, inputs=None) for part in collected("llama")[0]]  # no work can be done
    changed = [parts[0], change(parts[1]), change(parts[2])]
    with pytest.raises(ValueError, match=said):
        merge_statistics(changed)


def test_another_type_is_another_model(collected, build):
    other = collect_statistics(build(dtype=torch.bfloat16), BATCHES[:1], probes=1)
    with pytest.raises(ValueError, match="tensors of the model"):
        merge_statistics([collected("llama")[0][0], other])


def test_nothing_to_merge_is_an_error():
    with pytest.raises(ValueError, match="no statistics to merge"):
        merge_statistics([])
