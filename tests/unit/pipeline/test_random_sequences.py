"""Sequences of random tokens beside calibration data."""

import pytest
import torch
from torch import nn

from quark.torch.algorithm.registry import load_algorithm
from quark.torch.pipeline.random_sequences import add_random_sequences
from quark.torch.quantization.algorithms import count_with_random
from quark.torch.quantization.config.algo import (
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTQConfig,
    SmoothQuantConfig,
)
from tests.configurations import quantized_by
from tests.models.architectures import varied

WORDS = 64  # that the model embeds
DATA = torch.randint(3, WORDS, (5, 24), generator=torch.Generator().manual_seed(6))


class Embedder(nn.Module):
    """A model that embeds so many tokens."""

    def __init__(self, words=WORDS):
        super().__init__()
        self.embedding = nn.Embedding(words, 2)

    def get_input_embeddings(self):
        return self.embedding


def drawn(number, length=24):
    return torch.randint(WORDS, (1, length), generator=torch.Generator().manual_seed(number))


def extended(share):
    """What a share of 0.4 or 1 makes of the data."""
    chosen = {0.4: (0, 2), 1: range(5)}[share]
    pairs = ([DATA[i : i + 1], *([drawn(i)] if i in chosen else [])] for i in range(5))
    return [sequence for pair in pairs for sequence in pair]


@pytest.mark.parametrize("share", [0.4, 1])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_random_sequences_follow_those_of_the_data_for_every_batch_size(share, size):
    found = list(add_random_sequences(DATA.split(size), share, Embedder()))
    torch.testing.assert_close(found, extended(share), rtol=0, atol=0)


def test_masks_stay():
    mask = (torch.arange(24) < 20).long().expand(5, 24)
    batches = [{"input_ids": DATA.int(), "attention_mask": mask}]
    _, second, *_ = add_random_sequences(batches, 1, Embedder())
    assert torch.equal(second["attention_mask"], mask[:1])
    assert second["input_ids"].dtype == torch.int32 and torch.equal(second["input_ids"], drawn(0))


def test_tokens_reach_all_of_the_vocabulary():
    _, random = add_random_sequences([torch.zeros(1, 5000).long()], 1, Embedder(words=7))
    assert random.unique().tolist() == list(range(7))


def test_a_decoder_receives_them_too():
    batches = [{"input_ids": DATA[:1], "decoder_input_ids": DATA[:1, :8]}]
    _, second = add_random_sequences(batches, 1, Embedder())
    assert torch.equal(second["input_ids"], drawn(0))
    assert torch.equal(second["decoder_input_ids"], drawn(0, 8))


OTHER = [
    torch.ones(2, 8),
    {"input_ids": DATA, "pixel_values": torch.ones(5, 3, 4, 4)},
    {"inputs_embeds": torch.ones(2, 8, 4)},
    (DATA, DATA),
]


@pytest.mark.parametrize("batch", OTHER)
def test_other_data_has_none_and_a_warning(batch, caplog):
    with caplog.at_level("WARNING"):
        assert add_random_sequences([batch], 0.5, Embedder()) == [batch]
        assert add_random_sequences([DATA], 0.5, nn.Linear(2, 2)) == [DATA]
    assert caplog.text.count("random_tokens has no effect") == 2


def test_sequences_with_images_are_followed_by_none(caplog):
    image = {"input_ids": DATA[:1], "pixel_values": torch.ones(1, 3, 4, 4)}
    with caplog.at_level("WARNING"):
        found = list(add_random_sequences([image, DATA[:1], image], 1, Embedder()))
    assert [hasattr(sequence, "items") for sequence in found] == [True, False, False, True]
    assert torch.equal(found[2], drawn(1)) and "2 of 3 sequences" in caplog.text


@pytest.mark.parametrize("share", [-0.1, 1.1])
@pytest.mark.parametrize("kind", [GPTQConfig, AWQConfig, SmoothQuantConfig, AutoSmoothQuantConfig])
def test_other_shares_are_refused(kind, share):
    with pytest.raises(ValueError, match=f"random_tokens must be between 0 and 1, got {share}"):
        kind(random_tokens=share)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        ("int4_wo_32", GPTQConfig),
        ("uint4_wo_32", AWQConfig),
        ("ptpc_int8", SmoothQuantConfig),
        ("ptpc_int8", AutoSmoothQuantConfig),
    ],
)
def test_an_algorithm_receives_them(scheme, kind):
    """The option acts as the same data with the sequences, bit for bit, and not as the data."""
    states = [
        quantized_by(varied("llama"), scheme, options, data=data).state_dict()
        for options, data in (
            (kind(random_tokens=0.4), [DATA]),
            (kind(), extended(0.4)),
            (kind(), [DATA]),
        )
    ]
    given, expected, plain = ([s[name] for name in sorted(s)] for s in states)
    assert all(map(torch.equal, given, expected))
    assert not all(map(torch.equal, given, plain))


def test_plans_count_them():
    gptq = load_algorithm("gptq"), GPTQConfig(random_tokens=0.25)
    assert count_with_random(1000, [(load_algorithm("awq"), AWQConfig()), gptq]) == 1250
    assert count_with_random(1000, []) == 1000
