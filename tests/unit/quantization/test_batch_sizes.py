"""The size of the batches changes no bit of a quantized model."""

import pytest
import torch

from tests.unit.quantization.same_bits import WAYS, bits_of

IDS = torch.randint(3, 64, (9, 256), generator=torch.Generator().manual_seed(1))  # 2 chunks
QUICK = ("static", "gptq")  # the others are nightly tests
CASES = [
    pytest.param(way, marks=[] if way in QUICK else pytest.mark.nightly)
    for way in WAYS
    if way != "to nearest"
]


@pytest.mark.parametrize("way", CASES)
def test_batch_sizes(way):
    single = bits_of(way, torch.split(IDS, 1))
    for size in (2, 7):
        assert bits_of(way, torch.split(IDS, size)) == single
