"""Gradients block by block, against those through the model as a whole."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.pipeline.backward import run_blocks_backward
from quark.torch.quantization.nn.experts import split_experts
from tests.models.architectures import build, small_config
from tests.unit.pipeline.test_runner import KINDS, LIMITS, blocks_of

IDS = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(IDS)
MASK[1, -5:] = 0


def squares(logits, mask, first=0):
    kept = logits if mask is None else logits[mask]
    return kept.square().sum()


def watch(model, names, kept):
    """Keep gradients by what linear layers of blocks return."""

    def look(name):
        def hook(module, args, y):
            if y.requires_grad:
                y.register_hook(lambda g: kept.setdefault(name, []).append(g.clone()))

        return hook

    return [
        m.register_forward_hook(look(n))
        for n, m in model.named_modules()
        if isinstance(m, (nn.Linear, Conv1D)) and n.startswith(tuple(f"{name}." for name in names))
    ]


def through_the_whole(model, names, batches):
    kept = {}
    handles = watch(model, names, kept)
    for batch in batches:
        mask = batch.get("attention_mask")
        logits = model(**batch, use_cache=False).logits
        squares(logits, None if mask is None else mask.bool()).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return kept


def through_blocks(model, names, batches, **options):
    kept, order = {}, []
    for block, back in run_blocks_backward(model, names, batches, "test", squares, **options):
        order.append(block.name)
        handles = watch(model, [block.name], kept)
        for index in range(len(block)):
            back(index)
        for handle in handles:
            handle.remove()
    assert order == names[::-1]
    return kept


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_through_the_whole_model(name, limit):
    model = build(small_config(name, **KINDS[name])).eval()
    split_experts(model)  # grouped products have no gradients in double precision
    names = blocks_of(model)
    batches = [{"input_ids": IDS[:1]}, {"input_ids": IDS, "attention_mask": MASK}]
    expected = through_the_whole(model, names, batches)
    found = through_blocks(model, names, batches, limit=limit)
    assert expected and found.keys() == expected.keys()
    for layer, gradients in expected.items():
        for got, gradient in zip(found[layer], gradients, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)


class Branches(nn.Module):
    """Two lists of blocks, of which the second gives boxes, not logits."""

    def __init__(self, between=1.0):
        super().__init__()
        self.body, self.boxes = (nn.ModuleList(map(self.block, range(2))) for _ in range(2))
        self.between = between

    @staticmethod
    def block(number):
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        for block in self.body:
            x = block(x)
        logits = x
        x = x if self.between == 1 else x * self.between
        for block in self.boxes:
            x = block(x)
        return SimpleNamespace(logits=logits, boxes=x)


NAMES = ["body.0", "body.1", "boxes.0", "boxes.1"]
ROWS = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def whole_rows(model, names):
    """Gradients through the whole model on ROWS, by layer."""
    kept = {}
    handles = watch(model, names, kept)
    squares(model(ROWS).logits, None).backward()
    for handle in handles:
        handle.remove()
    return kept


@pytest.mark.parametrize("between", [2.0, 1], ids=["two stacks", "one stack"])
def test_gradients_of_blocks_that_no_logits_depend_on_are_zero(between):
    model = Branches(between).double()
    found = through_blocks(model, NAMES, [{"x": ROWS}])
    kept = whole_rows(model, NAMES)
    assert kept.keys() == {"body.0.0", "body.1.0"}
    for layer, gradients in kept.items():
        torch.testing.assert_close(found.pop(layer), gradients)
    assert found.keys() == {"boxes.0.0", "boxes.1.0"}
    assert not any(gradient.any() for gradients in found.values() for gradient in gradients)


class Readers(nn.Module):
    """Blocks whose hidden states of some depths a head reads."""

    def __init__(self, depths):
        super().__init__()
        self.body, self.depths = nn.ModuleList(map(Branches.block, range(4))), depths
        self.heads = nn.ModuleList(nn.Linear(6, 6) for _ in depths)

    def forward(self, x):
        states = []
        for block in self.body:
            x = block(x)
            states.append(x)
        for head, depth in zip(self.heads, self.depths, strict=True):
            x = x * head(states[depth]).tanh()
        return SimpleNamespace(logits=x)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("depths", [[], [0], [1, 2], [0, 1, 2]], ids=str)
def test_a_head_that_reads_several_hidden_states(depths, limit):
    model, names = Readers(depths).double(), [f"body.{i}" for i in range(4)]
    batches = [{"x": ROWS}, {"x": -ROWS}]
    found = through_blocks(model, names, batches, limit=limit)
    kept = whole_rows(model, names)
    assert found.keys() == kept.keys() == {f"{name}.0" for name in names}
    for layer, (gradient,) in kept.items():
        torch.testing.assert_close(found[layer][0], gradient)


class Shares(nn.Module):
    """Blocks that all read the values of the first one."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x, values):
            values = self.value(x) if values is None else values
            return x + self.out(values).tanh(), values

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        values = None
        for block in self.body:
            x, values = block(x, values)
        return SimpleNamespace(logits=x)


def test_values_of_the_first_block_that_later_ones_read_are_refused():
    with pytest.raises(ValueError, match=r"body\.0 computes tensors from its inputs.*such as gptq"):
        through_blocks(Shares().double(), [f"body.{i}" for i in range(3)], [{"x": ROWS}])


def test_the_model_is_as_it_was():
    model = build(small_config("llama"))
    model.lm_head.weight.requires_grad_(False)
    through_blocks(model, blocks_of(model), [{"input_ids": IDS}])
    asked = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert asked == {"lm_head.weight"}
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.config.use_cache


def test_a_model_without_logits():
    model = build(small_config("llama"))
    model.register_forward_hook(lambda module, args, output: SimpleNamespace(hidden=1))
    with pytest.raises(ValueError, match="need a model that returns logits, got SimpleNamespace"):
        through_blocks(model, blocks_of(model), [{"input_ids": IDS}])
