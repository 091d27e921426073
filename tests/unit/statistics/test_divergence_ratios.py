"""Units that are measured, and what they say of others."""

import pytest

from quark.torch.statistics.divergence_ratios import choose_units, divergence_ratios


def named(lists, kinds="abcde"):
    """Blocks of module lists, and their units."""
    blocks = [f"{name}.{i}" for name, count in lists.items() for i in range(count)]
    return blocks, [(f"{block}.{kind}",) for block in blocks for kind in kinds]


@pytest.mark.parametrize(
    ("count", "places"),
    [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (31, [0, 10, 20, 30])],
)
def test_units_of_usual_errors_in_a_few_blocks(count, places):
    blocks, units = named({"layers": count})
    sizes = {"a": 9.0, "b": 1.0, "c": 3.0, "d": 0.0, "e": 2.0}  # 1, 2, 3, 9: without effect, d
    errors = {unit: sizes[unit[0][-1]] for unit in units}
    chosen = choose_units(blocks, errors)
    assert chosen == [(f"layers.{i}.{kind}",) for i in places for kind in "ce"]


def test_a_block_of_one_unit():
    blocks, units = named({"layers": 2}, "a")
    assert choose_units(blocks, dict.fromkeys(units, 1.0)) == units


def test_units_without_effect_are_not_measured():
    blocks, units = named({"layers": 2})
    assert choose_units(blocks, dict.fromkeys(units, 0.0)) == []
    assert divergence_ratios(blocks, dict.fromkeys(units, 0.0), {}) == {}


def test_ratios_lie_on_lines():
    blocks, units = named({"layers": 7}, "ab")
    errors = {unit: 2.0 if unit[0].endswith("a") else 4.0 for unit in units}
    measured = {unit: errors[unit] for unit in units if unit[0].startswith("layers.0.")}
    measured |= {unit: 7.0 for unit in units if unit[0].startswith("layers.6.")}
    ratios = divergence_ratios(blocks, errors, measured)
    assert list(ratios) == blocks
    first, last = 1.0, 14 / 6  # the sum of two divergences for the sum of two errors
    expected = [first + (last - first) * i / 6 for i in range(7)]
    assert list(ratios.values()) == pytest.approx(expected)


def test_an_encoder_and_a_decoder_have_ratios_of_their_own():
    blocks, units = named({"encoder": 3, "decoder": 3}, "a")
    errors = dict.fromkeys(units, 1.0)
    chosen = choose_units(blocks, errors)
    assert chosen == units
    measured = {unit: 1.0 if unit[0].startswith("encoder") else 5.0 for unit in chosen}
    ratios = divergence_ratios(blocks, errors, measured)
    assert list(ratios.values()) == [1.0] * 3 + [5.0] * 3


def test_the_nearest_ratio_counts_beyond_the_measured():
    blocks, units = named({"layers": 5}, "a")
    errors = {unit: float(unit[0] not in ("layers.0.a", "layers.4.a")) for unit in units}
    ratios = divergence_ratios(blocks, errors, {("layers.1.a",): 3.0, ("layers.3.a",): 5.0})
    assert ratios == {"layers.1": 3.0, "layers.2": 4.0, "layers.3": 5.0}
