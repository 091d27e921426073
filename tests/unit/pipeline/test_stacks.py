"""Models of several stacks: each block gets what it gets in the model, changed blocks included."""

import pytest
import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.trace import trace
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.stacks import find_stacks
from quark.torch.quantization.nn.padding import without_padding
from tests.models.matrix import FAMILIES
from tests.unit.pipeline.test_backward import through_blocks, through_the_whole
from tests.unit.pipeline.test_runner import equal, run, seen_by

CASES = {case.name: case for cases in FAMILIES.values() for case in cases}
# Model -> number of blocks of its stacks in the order of execution.
STACKS = {
    "BART": [2, 2],
    "T5": [2, 2],
    "Whisper": [2, 2],
    "BERT": [2],
    "ViT": [2],
    "Swin": [2, 2],
    "ConvNeXt": [2, 2],
    "CLIP": [2, 2],
}


def made(name):
    """A model, its blocks, and two batches of different sizes."""
    case = CASES[name]
    model, batch = case.build(), case.batch()
    with eval_mode(model):
        names = list(trace(model, lambda: model(**batch)).blocks)
    cut = {
        k: v[:2, : 9 - k.startswith("decoder")].clone() if not v.is_floating_point() else v[:2]
        for k, v in batch.items()
    }
    if "pixel_values" in cut and "input_ids" in cut:
        cut["input_ids"][:, -1] = 2  # the end, where CLIP looks
    return model, names, [batch, cut]


def shrink_(module):
    """Change the matrices of a block."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight.mul_(0.8)


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_found_by_running(name):
    model, names, batches = made(name)
    with eval_mode(model):
        stacks = find_stacks(model, names, batches)
    assert [len(stack.names) for stack in stacks] == STACKS[name]
    assert [n for stack in stacks for n in stack.names] == names
    assert any(stack.shares for stack in stacks) == (name == "T5")


@pytest.mark.parametrize("name", STACKS)
def test_blocks_give_what_they_give_in_the_model(name):
    model, names, batches = made(name)
    model.config.use_cache = False
    equal(run(model, names, batches), seen_by(model, names, batches))


@pytest.mark.parametrize("name", ["BART", "T5", "CLIP", "Swin"])
def test_later_stacks_see_the_changed_ones(name):
    model, names, batches = made(name)
    model.config.use_cache = False
    with torch.no_grad():
        for number, block in enumerate(run_blocks(model, names, batches, "test")):
            if number < len(names) - 1:
                shrink_(block.module)
            block.run()
            last = [block.outputs(i).clone() for i in range(len(block))]
    expected = seen_by(model, names, batches)[names[-1]]
    for got, output in zip(last, expected, strict=True):
        torch.testing.assert_close(got, output, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["BART", "T5", "CLIP"])
def test_references_are_those_of_the_model_as_it_was(name):
    model, names, batches = made(name)
    model.config.use_cache = False
    expected = seen_by(model, names, batches)
    for block in run_blocks(model, names, batches, "test", compare=True):
        for index in range(len(block)):
            block.run_reference(index)
            target, _ = block.reference_output(index)
            torch.testing.assert_close(target, expected[block.name][index], rtol=0, atol=0)
        with torch.no_grad():
            shrink_(block.module)


def test_masks_are_those_of_the_stack():
    """The decoder has other tokens than the encoder, and a mask of its own."""
    model, names, batches = made("BART")
    batch = dict(batches[0])
    mask = torch.ones_like(batch["decoder_input_ids"])
    mask[2, 6:] = 0
    seen = {}
    for data in (batch, batch | {"decoder_attention_mask": mask}):
        for block in run_blocks(model, names, [data], "test"):
            seen.setdefault(block.name, []).append(block.masks(0))
    encoder = batch["attention_mask"].bool()
    for name in names[:2]:
        assert all(torch.equal(found, encoder) for found in seen[name])
    for name in names[2:]:
        assert seen[name][0] is None and torch.equal(seen[name][1], mask.bool())


def test_cross_attention_leaves_out_the_padding_of_the_encoder():
    model, names, [batch, _] = made("BART")
    seen = {}

    def watch(name):
        def hook(module, args):
            seen[name] = without_padding(args[0]).shape[:2].numel()

        return model.get_submodule(name).register_forward_pre_hook(hook)

    readers = [f"{names[2]}.encoder_attn.{part}_proj" for part in "qk"]
    handles = [watch(name) for name in readers]
    for block in run_blocks(model, names, [batch], "test"):
        block.run()
    for handle in handles:
        handle.remove()
    assert [seen[name] for name in readers] == [3 * 11, int(batch["attention_mask"].sum())]


@pytest.mark.parametrize("name", ["BART", "T5"])
def test_gradients_reach_every_stack(name):
    model, names, batches = made(name)
    model.double()
    expected = through_the_whole(model, names, [{**b, "attention_mask": None} for b in batches])
    found = {}
    plain = [{k: v for k, v in b.items() if k != "attention_mask"} for b in batches]
    found = through_blocks(model, names, plain)
    assert found.keys() == expected.keys()
    for layer, gradients in expected.items():
        for got, gradient in zip(found[layer], gradients, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)


class Tower(nn.Module):
    """A text model that reads images, if there are any, through a tower."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.text = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, image=None):
        if image is not None:
            for layer in self.tower:
                image = layer(image)
            x = x + image.mean(1, keepdim=True)
        for layer in self.text:
            x = layer(x)
        return x


def test_batches_without_images_do_not_enter_the_tower():
    model = Tower()
    names = [f"{stack}.{i}" for stack in ("tower", "text") for i in range(2)]
    image, text = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    batches = [{"x": text, "image": image}, {"x": text}, {"x": text + 1, "image": image * 2}]
    found = run(model, names, batches)
    assert {name: len(outputs) for name, outputs in found.items()} == {
        **dict.fromkeys(names[:2], 2),
        **dict.fromkeys(names[2:], 3),
    }
    equal(found, seen_by(model, names, batches))


class TwoStreams(nn.Module):
    """Blocks that change an image and a text, and return the text first."""

    class Block(nn.Module):
        """A layer for each stream."""

        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, hidden_states, encoder_hidden_states):
            mixed = encoder_hidden_states.mean(1, keepdim=True)
            image = self.image(hidden_states + mixed)
            return self.text(encoder_hidden_states), image

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, image, text):
        for block in self.blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text)
        return image


@torch.no_grad()
def test_blocks_that_change_two_streams():
    model = TwoStreams()
    batches = [{"image": torch.randn(2, n, 8), "text": torch.randn(2, 3, 8)} for n in (5, 6)]
    names = list(trace(model, lambda: model(**batches[0])).blocks)
    assert names == ["blocks.0", "blocks.1", "blocks.2"]
    assert [len(stack.names) for stack in find_stacks(model, names, batches)] == [1, 1, 1]
    found = {}
    for block in run_blocks(model, names, batches, "test"):
        block.module.text.weight.mul_(0.5)  # which the next block receives
        block.run()
        found[block.name] = [block.outputs(i).clone() for i in range(len(block))]
    kept, handles = {name: [] for name in names}, []
    for name in names:
        keep = kept[name].append
        hook = lambda _, args, output, keep=keep: keep(output[1])  # noqa: E731
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    for batch in batches:
        model(**batch)
    equal(found, kept)


class Computed(nn.Module):
    """A block that receives a tensor that the model computes between blocks."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, skip=None):
        return x + self.a(x).tanh() + (0 if skip is None else self.b(skip))


class Skips(nn.Module):
    """A chain of blocks; ``skip`` computes what a block receives beside the hidden states."""

    def __init__(self, skip):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Computed() for _ in range(4))
        self.skip = skip

    def forward(self, x):
        first = skip = x
        for number, layer in enumerate(self.layers):
            x = layer(x, skip)
            skip = self.skip(number, first, x, skip)
        return x


# What is computed between blocks -> the blocks of each stack.
SKIPS = {
    "constant": (lambda number, first, x, skip: first, [4]),
    "of the inputs": (lambda number, first, x, skip: 2 * first, [4]),
    "of all outputs": (lambda number, first, x, skip: 0.5 * x, [1, 1, 1, 1]),
    "of one output": (lambda number, first, x, skip: x.sin() if number == 1 else skip, [2, 2]),
    "sum so far": (lambda number, first, x, skip: skip + x, [1, 1, 1, 1]),
    "absent later": (lambda number, first, x, skip: None, [4]),
}


@pytest.mark.parametrize("case", SKIPS)
def test_a_tensor_that_is_computed_between_blocks(case):
    skip, sizes = SKIPS[case]
    model = Skips(skip).eval()
    names = [f"layers.{i}" for i in range(4)]
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(shape, generator=generator) for shape in ((2, 5, 8), (1, 3, 8))]
    assert [len(s.names) for s in find_stacks(model, names, batches)] == sizes
    equal(run(model, names, batches), seen_by(model, names, batches))
    with torch.no_grad():
        for block in run_blocks(model, names, batches, "test"):
            shrink_(block.module)
            block.run()
            last = [block.outputs(i).clone() for i in range(len(block))]
    for got, output in zip(last, seen_by(model, names, batches)[names[-1]], strict=True):
        torch.testing.assert_close(got, output, rtol=0, atol=0)
