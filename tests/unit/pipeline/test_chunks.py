"""Chunks: the same for every batch size, with at most so many sequences and tokens."""

import pytest
import torch

from quark.torch.pipeline.chunks import SEQUENCES, TOKENS, Chunks, count_calls

IDS = torch.arange(7 * 512).view(7, 512)


def cut(data, size):
    """Mappings with so many sequences each."""
    return [
        {"input_ids": ids, "attention_mask": ids > 3, "use_cache": False}
        for ids in torch.split(data, size)
    ]


@pytest.mark.parametrize("make", [lambda data, size: torch.split(data, size), cut])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_batches_make_no_difference(make, size):
    chunks = list(Chunks(make(IDS, size)))
    torch.testing.assert_close(chunks, [*make(IDS[:4], 4), *make(IDS[4:], 3)], rtol=0, atol=0)


def shapes(batches, **limits):
    return [tuple(chunk.shape) for chunk in Chunks(batches, **limits)]


def test_limits():
    assert shapes([torch.ones(200, 3)]) == [(SEQUENCES, 3)] * 3 + [(200 - 3 * SEQUENCES, 3)]
    assert shapes([torch.ones(3, TOKENS + 1)]) == [(1, TOKENS + 1)] * 3
    assert shapes([torch.ones(5, 8)], tokens=16) == [(2, 8), (2, 8), (1, 8)]
    assert shapes([IDS], sequences=1) == shapes(Chunks([IDS]), sequences=1) == [(1, 512)] * 7
    images = shapes([torch.ones(20, 3, 224, 224)])  # 294 tokens each
    assert [len(shape) for shape in images] == [4] * 4 and images[0] == (6, 3, 224, 224)


def test_other_shapes_arguments_and_values_begin_a_chunk():
    x, y = torch.ones(2, 8), torch.ones(2, 9)
    assert shapes([x, x, y, x]) == [(4, 8), (2, 9), (2, 8)]
    assert shapes([x, x.int(), x]) == [(2, 8)] * 3
    batches = [{"x": x}, {"x": x, "n": 1}, {"x": x, "n": 2}, {"x": x, "n": torch.tensor(2)}]
    assert [chunk.get("n") for chunk in Chunks([*batches, {"x": x}])] == [
        None,
        1,
        2,
        torch.tensor(2),
        None,
    ]


def test_whole_batches_and_several_tensors_stay_apart():
    whole = {"input_ids": IDS, "labels": torch.ones(7)}
    assert [chunk is whole for chunk in Chunks([whole, whole])] == [True, True]
    images = {"input_ids": torch.ones(2, 8), "pixel_values": torch.ones(2, 3, 4, 4)}
    assert [len(chunk["pixel_values"]) for chunk in Chunks([images, images])] == [1] * 4
    positions = {"input_ids": torch.ones(3, 8), "position_ids": torch.ones(3, 3, 8).int()}
    assert next(iter(Chunks([positions]))) is positions  # the first axis may be another one


def test_length_and_repetition():
    chunks = Chunks([IDS[:3], [{"x": IDS}], IDS[:0]])
    assert len(chunks) == len(list(chunks)) == len(list(chunks)) == count_calls(chunks) == 3
    assert count_calls([IDS, [{"x": IDS}, {"x": IDS}], IDS[:0]]) == 3
    assert len(Chunks([])) == 0
