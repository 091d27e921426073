"""Batches of every documented kind: how they run, what is padding, and what is a beginning."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from quark.torch.pipeline.batches import (
    FixedArguments,
    FixedMapping,
    count_sequences,
    flatten_batches,
    padding_mask,
    run_batch,
    split_sequences,
    take_excerpt,
)
from quark.torch.pipeline.data_source import make_repeatable

IDS = torch.arange(3, 83).view(2, 40)
ONES = torch.ones(2, 40, dtype=torch.long)


class Named(NamedTuple):
    """Arguments, as a collating function of an application may return them."""

    ids: torch.Tensor
    mask: torch.Tensor


class Listener(nn.Module):
    """Remembers what it was called with."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((args, kwargs))


def called(batch):
    model = Listener()
    run_batch(model, batch)
    return model.calls


def test_how_a_model_is_called():
    assert called(IDS) == [((IDS,), {})]
    assert called({"input_ids": IDS, "n": 3}) == [((), {"input_ids": IDS, "n": 3})]
    assert called(BatchEncoding({"input_ids": IDS})) == [((), {"input_ids": IDS})]
    assert called([IDS, ONES]) == called((IDS, ONES)) == [((IDS, ONES), {})]
    assert called([{"x": IDS}, {"x": ONES}]) == [((), {"x": IDS}), ((), {"x": ONES})]


@pytest.mark.parametrize("batch", ["text", 3, None, ["text"]], ids=str)
def test_what_is_no_batch(batch):
    with pytest.raises(TypeError, match="A batch must be a tensor, a mapping"):
        run_batch(Listener(), batch)


def test_parts_are_what_the_model_is_called_with_once():
    batches = [IDS, {"x": IDS}, [IDS, ONES], [{"x": IDS}, [{"x": ONES}]], (IDS,)]
    found = list(flatten_batches(batches))
    assert [len(called(part)) for part in found] == [1] * 6
    assert [call for part in found for call in called(part)] == [
        call for batch in batches for call in called(batch)
    ]


ROWS = {
    "ids": (IDS, [IDS[:1], IDS[1:]]),
    "mapping": (
        {"input_ids": IDS, "n": 3, "labels": None, "flag": True, "scale": torch.tensor(2.0)},
        [
            {"input_ids": row, "n": 3, "labels": None, "flag": True, "scale": torch.tensor(2.0)}
            for row in (IDS[:1], IDS[1:])
        ],
    ),
    "of a tokenizer": (BatchEncoding({"x": IDS}), [{"x": IDS[:1]}, {"x": IDS[1:]}]),
    "arguments": ((IDS, ONES), [(IDS[:1], ONES[:1]), (IDS[1:], ONES[1:])]),
    "named": (Named(IDS, ONES), [Named(IDS[:1], ONES[:1]), Named(IDS[1:], ONES[1:])]),
    "several": ([{"x": IDS[:1]}, {"x": ONES}], [{"x": IDS[:1]}, {"x": ONES[:1]}, {"x": ONES[1:]}]),
}


@pytest.mark.parametrize(("batch", "expected"), ROWS.values(), ids=ROWS)
def test_sequences_are_batches_of_one(batch, expected):
    found = list(split_sequences([batch]))
    assert [type(part) for part in found] == [type(part) for part in expected]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WHOLE = {
    "positions for all": {"input_ids": IDS, "position_ids": torch.arange(40).unsqueeze(0)},
    "a vector": {"input_ids": IDS, "cache_position": torch.arange(2)},
    "tensors within": {"input_ids": IDS, "past": [(IDS, IDS)]},
    "no tensor": {"n": 3},
    "no batch": "text",
}


@pytest.mark.parametrize("batch", WHOLE.values(), ids=WHOLE)
def test_sequences_that_cannot_be_told_apart_stay_together(batch):
    (found,) = split_sequences([batch])
    assert found is batch


@pytest.mark.parametrize("make", [iter, lambda x: (b for b in x)], ids=["iterator", "generator"])
def test_an_iterator_is_kept(make):
    batches = make_repeatable(make([1, 2]))
    assert list(batches) == list(batches) == [1, 2]


def test_a_loader_is_taken_as_it_is():
    loader = torch.utils.data.DataLoader(IDS)
    assert make_repeatable(loader) is loader
    assert list(make_repeatable(None)) == []


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IDS, IDS[:1, :32]),
        (IDS[:, :5], IDS[:1, :5]),
        ({"input_ids": IDS, "flag": True}, {"input_ids": IDS[:1, :32], "flag": True}),
        ([IDS, ONES], [IDS[:1, :32], ONES[:1, :32]]),
        ([{"x": IDS}, {"x": ONES}], {"x": IDS[:1, :32]}),
        ({"x": torch.ones(2, 3, 4)}, {"x": torch.ones(1, 3, 4)}),
        (torch.ones(2, 40), torch.ones(1, 40)),
    ],
    ids=["ids", "short", "mapping", "arguments", "several", "three axes", "floats"],
)
def test_an_excerpt_is_the_beginning_of_the_first_sequence(batch, expected):
    torch.testing.assert_close(take_excerpt(batch), expected, rtol=0, atol=0)


IMAGES = torch.ones(2, 3, 40, 40)
STAY_WHOLE = {  # along all axes but the first
    "images and texts": {"pixel_values": IMAGES, "input_ids": IDS, "attention_mask": ONES},
    "audio": {"input_features": torch.ones(2, 80, 3000), "decoder_input_ids": IDS},
    "embeddings": {"inputs_embeds": torch.ones(2, 40, 8), "attention_mask": ONES},
    "pooled projections": {"hidden_states": torch.ones(2, 50, 8), "pooled": torch.ones(2, 64)},
    "time steps": {"sample": IMAGES, "timestep": torch.tensor([1, 2])},
}


@pytest.mark.parametrize("batch", STAY_WHOLE.values(), ids=STAY_WHOLE)
def test_an_excerpt_cuts_nothing_but_tokens(batch):
    expected = {key: value[:1] for key, value in batch.items()}
    torch.testing.assert_close(take_excerpt(batch), expected, rtol=0, atol=0)


def test_an_excerpt_of_an_encoder_and_a_decoder():
    batch = {"input_ids": IDS, "attention_mask": ONES, "decoder_input_ids": IDS[:, :35]}
    found = take_excerpt(batch | {"labels": torch.tensor([1, 2]), "scale": torch.tensor(0.5)})
    assert [tuple(t.shape) for t in found.values()] == [(1, 32)] * 3 + [(1,), ()]


def test_an_excerpt_of_images_on_one_axis_is_the_batch():
    """The patches of all images lie on one axis: which are those of the first text?"""
    batch = {"input_ids": IDS, "pixel_values": torch.ones(24, 9), "grid": torch.ones(2, 3).long()}
    assert take_excerpt(batch) is batch


def padded(left):
    ids, mask = IDS.clone(), ONES.clone()
    ids[0, :left], mask[0, :left] = 0, 0
    return ids, mask


@pytest.mark.parametrize(("left", "start"), [(0, 0), (1, 0), (2, 2), (30, 30), (40, 0)])
def test_padding_in_front_is_left_out(left, start):
    ids, _ = padded(left)
    expected = ids[:1, start : start + 32]
    assert torch.equal(take_excerpt(ids), expected)
    assert torch.equal(take_excerpt({"input_ids": ids})["input_ids"], expected)
    assert torch.equal(take_excerpt([ids, ONES])[0], expected)


def test_the_mask_says_where_padding_ends():
    ids, mask = padded(9)
    ids[0, 9] = 0  # a token like those of the padding
    found = take_excerpt({"input_ids": ids, "attention_mask": mask})
    assert torch.equal(found["input_ids"], ids[:1, 9:])
    assert bool(found["attention_mask"].all())


def test_padding_is_what_the_mask_says():
    ids, mask = padded(9)
    found = padding_mask({"input_ids": ids, "attention_mask": mask})
    assert found.dtype is torch.bool and torch.equal(found, mask != 0)


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        [IDS, ONES],
        {"input_ids": IDS},
        {"attention_mask": ONES},
        {"attention_mask": torch.zeros(2, 1, 40, 40)},
    ],
    ids=["ids", "arguments", "none", "all", "four axes"],
)
def test_without_a_mask_nothing_is_padding(batch):
    assert padding_mask(batch) is None


@pytest.mark.parametrize(
    "batch",
    [FixedArguments([torch.ones(4, 8, dtype=torch.int64)]), FixedMapping(x=torch.ones(4, 8, 2))],
    ids=["arguments", "mapping"],
)
def test_fixed_batches_are_neither_cut_nor_split(batch):
    assert take_excerpt(batch) is batch and count_sequences(batch) is None
    assert [part is batch for part in split_sequences([batch])] == [True]
