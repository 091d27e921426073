"""Calibration data of every kind: the same ranges, or one clear error before the model runs."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from transformers import BatchEncoding

from quark.torch import ModelQuantizer
from quark.torch.pipeline.data_source import check_batches, make_repeatable
from quark.torch.pipeline.statistics import data_digest
from quark.torch.quantization.config.algo import GPTQConfig
from tests.configurations import preset
from tests.models.architectures import varied

IDS = torch.randint(3, 60, (4, 10), generator=torch.Generator().manual_seed(4))


class Stream(IterableDataset):
    """Gives its rows once."""

    def __init__(self):
        self.rows = iter(IDS)

    def __iter__(self):
        return self.rows


class Unsized:
    """An iterable without a length, which starts again each time."""

    def __iter__(self):
        return iter(IDS.split(2))


SOURCES = {
    "batches": lambda: list(IDS.split(2)),
    "a tensor": lambda: IDS,
    "a loader": lambda: DataLoader(IDS, batch_size=3),
    "a loader of tuples": lambda: DataLoader(TensorDataset(IDS), batch_size=2),
    "a stream": lambda: DataLoader(Stream(), batch_size=2),
    "a generator": lambda: (row for row in IDS.split(1)),
    "without a length": Unsized,
    "one mapping": lambda: {"input_ids": IDS},
    "of a tokenizer": lambda: BatchEncoding({"input_ids": IDS}),
    "mappings": lambda: [{"input_ids": IDS[:1]}, BatchEncoding({"input_ids": IDS[1:]})],
    "lists of mappings": lambda: [[{"input_ids": row} for row in IDS.split(1)]],
    "tuples": lambda: [(IDS[:3],), (IDS[3:],)],
    "batches without rows": lambda: [IDS[:0], IDS[:3], {"input_ids": IDS[:0]}, IDS[3:], IDS[:, :0]],
}


def scales(source, *algorithms):
    model = varied("llama", num_hidden_layers=1)
    model = ModelQuantizer(preset("int8", *algorithms)).quantize_model(model, source)
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("scale")}


@pytest.mark.parametrize("algorithm", [None, GPTQConfig()], ids=["none", "gptq"])
def test_every_source_gives_the_same(algorithm):
    algorithms = [] if algorithm is None else [algorithm]
    expected = scales([IDS], *algorithms)
    for name, source in SOURCES.items():
        result = scales(source(), *algorithms)
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            tolerance = {"rtol": 1e-4, "atol": 0} if algorithms else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(result[key], value, **tolerance, msg=f"{name}: {key}")


WRONG = {
    "no batches": ([], ValueError, "The dataloader is empty: static activation ranges need"),
    "an empty tensor": (IDS[:0], ValueError, "The dataloader is empty"),
    "no rows": ([IDS[:0], {"input_ids": IDS[:0]}], ValueError, "The dataloader is empty"),
    "one row": (IDS[0], ValueError, r"one tensor of shape \(10,\): give rows, such as"),
    "text": ("text", TypeError, "The dataloader is a str: give a list, a DataLoader"),
    "a number": (3, TypeError, "The dataloader is a int: give"),
    "texts": (["text"], TypeError, "A batch must be a tensor"),
    "lists": ([IDS[0].tolist()], TypeError, "A batch must be a tensor, .* got .*int"),
    "lists in a mapping": (
        [{"input_ids": IDS}, BatchEncoding({"input_ids": IDS.tolist()})],
        ValueError,
        r"Batch 1 of the dataloader has no tensors \(input_ids is a list\): pass return_tensors",
    ),
    "a large token": ([IDS, IDS + 4], ValueError, "Batch 1 .* token 6., but .* tokens 0 to 63"),
    "a negative token": ({"input_ids": -IDS}, ValueError, "Batch 0 .* has the token -"),
}


@pytest.mark.parametrize(("source", "error", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit(source, error, said, unchanged):
    model, calls = varied("llama"), []
    if said.startswith("Batch 1 .* token"):
        source[1][0, 0] = 64
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    with unchanged(model), pytest.raises(error, match=said):
        ModelQuantizer(preset("int8")).quantize_model(model, source)
    assert not calls


def test_a_source_is_read_again_only_if_it_can_be():
    loader, rows = DataLoader(IDS, batch_size=2), [IDS]
    assert make_repeatable(loader) is loader and make_repeatable(rows) is rows
    stream = make_repeatable(DataLoader(Stream(), batch_size=2))
    assert len(list(stream)) == len(list(stream)) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "batch_size": None},
        {"sampler": RandomSampler(IDS)},
        {"batch_sampler": BatchSampler(RandomSampler(IDS), 2, drop_last=False)},
        {"batch_sampler": [[1, 0], [2]]},  # nobody knows what it gives the next time
    ],
    ids=["shuffled", "shuffled samples", "sampler", "batch sampler", "list"],
)
def test_a_loader_that_may_change_its_order_is_read_once(options):
    loader = DataLoader(IDS, **options)
    batches = make_repeatable(loader)
    first, second = list(batches), list(batches)
    assert len(first) == len(loader)
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_numbers_are_no_tokens():
    """A model without an embedding of tokens takes any numbers."""
    batches = [torch.full((2, 4), 1000), (torch.ones(2, 4), 3)]
    assert check_batches(nn.Linear(4, 4), batches) == data_digest(batches)
    assert check_batches(nn.Linear(4, 4), [torch.ones(0, 4)]) is None


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        (IDS.float(), r"ids of tokens in torch\.float32: convert them with \.long\(\)"),
        (IDS[0], r"of shape \(10,\): give rows, .* such as ids\.unsqueeze\(0\)"),
        ({"input_ids": IDS[0]}, r"give rows"),
        ({"input_ids": IDS.to("meta")}, r"input_ids is on the meta device"),
        ({"tokens": IDS}, r"has tokens, but \w+ takes input_ids, .*Rename the keys"),
        ("Some text", r"got a str\. Tokenize the text: tokenizer\(text, return_tensors="),
        (None, r"got None\. Give what the model is called with"),
    ],
    ids=["floats", "one row", "one row by name", "meta", "keys", "text", "None"],
)
def test_a_batch_that_the_model_does_not_take(batch, advice):
    with pytest.raises((TypeError, ValueError), match=advice):
        check_batches(varied("llama", num_hidden_layers=1), [batch])


def test_token_ids_as_a_list_are_no_batch():
    with pytest.raises(TypeError, match=r"got a int\. Make a tensor of token ids"):
        check_batches(nn.Linear(4, 4), [[1, 2, 3]])
