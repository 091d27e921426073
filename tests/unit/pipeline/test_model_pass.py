"""A pass of data through a whole model: by batches in memory, by blocks of a model that is not."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from quark.torch.export.checkpoint.streamed_model import stream_model
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.model_pass import run_data
from tests.models.architectures import build, small_config


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 64, (n, 12), generator=generator) for n in (2, 1, 3)]


def seen(model, batches, limit=None):
    """What each linear layer receives while data is observed, and the logits."""
    inputs, calls, logits = {}, Counter(), {}

    @contextmanager
    def observe():
        def watch(name):
            def hook(module, args):
                calls[name] += 1
                inputs.setdefault(name, []).append(args[0].detach().clone())

            return hook

        handles = [
            m.register_forward_pre_hook(watch(n))
            for n, m in model.named_modules()
            if isinstance(m, (nn.Linear, nn.Embedding))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    count = run_data(
        model,
        batches,
        "test",
        observe=observe,
        receive=lambda index, output: logits.update({index: output.logits}),
        limit=limit,
    )
    assert count == len(batches)
    return inputs, calls, logits


@pytest.mark.parametrize("kind", ["llama", "opt", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("limit", [0, None])
@pytest.mark.sampled(2, covers=True)
def test_by_blocks_as_by_batches(kind, limit, data, tmp_path):
    model = build(small_config(kind), torch.float32)
    model.save_pretrained(tmp_path)
    streamed = stream_model(tmp_path)
    residency_of(streamed).limit = 0
    inputs, calls, logits = seen(model, data)
    own_inputs, own_calls, own_logits = seen(streamed, data, limit)
    assert own_calls == calls  # nothing is observed twice
    for name, tensors in inputs.items():
        assert all(map(torch.equal, own_inputs[name], tensors)), name
    assert own_logits.keys() == logits.keys()
    assert all(torch.equal(own_logits[i], logits[i]) for i in logits)


def test_each_part_is_read_once_for_all_batches(data, tmp_path):
    build(small_config("llama"), torch.float32).save_pretrained(tmp_path)
    model = stream_model(tmp_path)
    cache = residency_of(model)
    cache.limit = 0
    reads = Counter()
    read = cache.source.read
    cache.source.read = lambda names: (reads.update(names), read(names))[1]
    run_data(model, data * 4, "test")
    # Blocks are read to trace the model, to divide it into stacks, and once for the data.
    assert {reads[n] for n in reads if ".layers." in n} == {3}


@pytest.mark.parametrize(
    ("observed", "ends_early"),
    [(["model.layers.1.mlp"], True), (["model.layers.0", "lm_head"], False), (None, False)],
)
def test_ends_behind_the_last_block_if_nothing_more_is_observed(
    observed, ends_early, data, tmp_path
):
    build(small_config("llama"), torch.float32).save_pretrained(tmp_path)
    model = stream_model(tmp_path)
    tokens = Counter()

    @contextmanager
    def observe():
        handles = [
            module.register_forward_pre_hook(
                lambda _, args, name=name: tokens.update({name: args[0].shape[:-1].numel()})
            )
            for name, module in (("mlp", model.model.layers[1].mlp), ("head", model.lm_head))
        ]
        yield
        for handle in handles:
            handle.remove()

    assert run_data(model, data, "test", observe=observe, observed=observed) == len(data)
    every = sum(batch.numel() for batch in data)
    assert tokens == ({"mlp": every} if ends_early else {"mlp": every, "head": every})


def test_no_data(tmp_path):
    build(small_config("llama"), torch.float32).save_pretrained(tmp_path)
    assert run_data(stream_model(tmp_path), [], "test") == 0
