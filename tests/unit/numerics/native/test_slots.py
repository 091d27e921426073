"""Slots of bytes by kernels are those of single codes."""

import pytest
import torch

from quark.torch.numerics.native.slots import find_plane, read_slots

PLACES = [(8, 0), (4, 0), (2, 0), (1, 0), (2, 4), (1, 4), (1, 2), (1, 6), (2, 1)]


@pytest.fixture
def codes():
    """Every byte, in any order, thrice."""
    every = torch.arange(256, dtype=torch.uint8).repeat(3)
    return every[torch.randperm(len(every))]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("added", [0, 1, 8, 127, 128])
@pytest.mark.parametrize(("width", "below"), PLACES)
def test_each_byte(codes, width, below, added, threads, any_size, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr("quark.torch.numerics.native.compilation._PIECE", 16)
    slots = codes.view(3, 8 // width, -1)
    plane = find_plane(slots, width, below, added)
    assert plane.shape == (3, slots.shape[2])
    stored = [
        [(int(code) + added) % 256 >> below & ((1 << width) - 1) for code in row]
        for row in codes.view(3, -1)
    ]
    for row, panel in zip(stored, plane, strict=True):
        for i, byte in enumerate(panel.tolist()):
            own = row[i :: len(panel)]
            assert byte == sum(part << (width * slot) for slot, part in enumerate(own))
    restored = torch.full_like(slots, (1 << below) - 1)
    assert read_slots(plane, restored, width, below)
    expected = torch.tensor(stored, dtype=torch.uint8) << below | ((1 << below) - 1)
    assert torch.equal(restored.view(3, -1), expected)


def test_what_is_left_to_torch(any_size):
    assert find_plane(torch.zeros(2, 2, 12, dtype=torch.uint8), 4, 0, 0) is None  # no whole words
    turned = torch.zeros(16, 2, 2, dtype=torch.uint8).permute(2, 1, 0)
    assert find_plane(turned, 4, 0, 0) is None
    assert find_plane(torch.zeros(34, dtype=torch.uint8)[2:].view(2, 2, 8), 4, 0, 0) is None
    plane = torch.zeros(2, 12, dtype=torch.uint8)
    assert not read_slots(plane, torch.zeros(2, 2, 12, dtype=torch.uint8), 4, 0)
