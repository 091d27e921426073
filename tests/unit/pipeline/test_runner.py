"""Data through a model block by block, against the model as a whole."""

import pytest
import torch
from torch import nn

from quark.torch.pipeline.runner import run_blocks

KINDS = {
    "llama": {},
    "opt": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gemma3_text": {"head_dim": 16, "sliding_window": 4, "layer_types": None},  # masks differ
    "mixtral": {"num_local_experts": 4},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {"bos_token_id": 1},
}
LIMITS = [0, 1 << 30]


def blocks_of(model):
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    longest = next(m for m in lists if len(m) == max(map(len, lists)))
    inside = set(map(id, longest))
    return [name for name, module in model.named_modules() if id(module) in inside]


def seen_by(model, names, batches):
    """Outputs of blocks when the whole model runs."""
    seen = {name: [] for name in names}

    def watch(name):
        def hook(module, args, output):
            seen[name].append(output if isinstance(output, torch.Tensor) else output[0])

        return hook

    handles = [model.get_submodule(n).register_forward_hook(watch(n)) for n in names]
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return seen


def run(model, names, batches, **options):
    found = {}
    for block in run_blocks(model, names, batches, "test", **options):
        block.run()
        found[block.name] = [block.outputs(i).clone() for i in range(len(block))]
    return found


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, outputs in expected.items():
        for got, output in zip(found[name], outputs, strict=True):
            torch.testing.assert_close(got, output, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", LIMITS)
def test_blocks_give_what_they_give_in_the_model(build, batches, kind, limit):
    model = build(kind, **KINDS[kind])
    names = blocks_of(model)
    equal(run(model, names, batches, limit=limit), seen_by(model, names, batches))


def test_padded_batches(build):
    model = build()
    names = blocks_of(model)
    ids = torch.randint(3, 64, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    batches = [{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}]
    equal(run(model, names, batches), seen_by(model, names, batches))
    masks = []
    for block in run_blocks(model, names[:1], batches, "test"):
        hook = block.module.register_forward_pre_hook(
            lambda *_, block=block: masks.append(block.mask)
        )
        block.run()
        hook.remove()
        assert block.mask is None
    assert torch.equal(masks[0], mask.bool()) and masks[1] is None


def test_the_next_block_sees_the_last_run(build, batches):
    """The two passes of a sequential method: observe, change, run again."""
    model, changed = build(), build()
    names = blocks_of(model)
    with torch.no_grad():
        for block in run_blocks(changed, names, batches, "test"):
            block.run()
            block.module.mlp.down_proj.weight.mul_(0.5)
            block.run()
            last = [block.outputs(i).clone() for i in range(len(block))]
        expected = seen_by(changed, names, batches)[names[-1]]
    for got, output in zip(last, expected, strict=True):
        torch.testing.assert_close(got, output, rtol=0, atol=0)


def test_a_block_that_is_not_run_is_run(build, batches):
    model = build()
    names = blocks_of(model)
    expected = seen_by(model, names, batches)
    for block in run_blocks(model, names, batches, "test"):
        if block.name == names[-1]:
            block.run()
            got = block.outputs(0).clone()
    assert torch.equal(got, expected[names[-1]][0])


def test_the_model_is_left_as_it_was(build, batches, unchanged):
    model = build("opt").train()  # with dropout
    with unchanged(model):
        run(model, blocks_of(model), batches)
    assert model.config.use_cache


def test_an_abandoned_run_leaves_the_model(build, batches, unchanged):
    model = build().train()
    with unchanged(model):
        for block in run_blocks(model, blocks_of(model), batches, "test"):
            block.run()
            break


def test_gradients_through_a_block(build, batches):
    model = build()
    names = blocks_of(model)
    for block in run_blocks(model, names, batches, "test"):
        block.call(0).square().sum().backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())


def test_a_call_with_other_parameters(build, batches):
    """It gives what the block would give with them, which it does not keep."""
    model, changed = build(), build()
    names = blocks_of(model)
    changed.get_submodule(names[0]).mlp.down_proj.weight.detach().mul_(0.5)
    expected = seen_by(changed, names, batches)[names[0]]
    half = (0.5 * model.get_submodule(names[0]).mlp.down_proj.weight).detach().requires_grad_()
    for block in run_blocks(model, names[:1], batches, "test"):
        found = block.call(1, {"mlp.down_proj.weight": half})
        torch.testing.assert_close(found, expected[1], rtol=0, atol=0)
        assert not torch.equal(block.call(1), found)
        found.square().sum().backward()
    assert half.grad is not None
    assert model.get_submodule(names[0]).mlp.down_proj.weight.grad is None


def test_targets_are_outputs_of_the_model_as_it_was(build, batches):
    model = build()
    names = blocks_of(model)
    mask = torch.tensor([[True] * 10 + [False] * 2, [True] * 12])
    data = [{"input_ids": batches[0], "attention_mask": mask.long()}, batches[1]]
    expected = seen_by(model, names, data)
    for block in run_blocks(model, names, data, "test", compare=True):
        for index in range(len(block)):
            block.run_reference(index)
            target, kept = block.reference_output(index)
            torch.testing.assert_close(target, expected[block.name][index], rtol=0, atol=0)
            assert (kept is None) if index else torch.equal(kept, mask)
        with torch.no_grad():
            block.module.mlp.down_proj.weight.mul_(0.5)


def test_blocks_come_without_data_as_well(build):
    model = build()
    found = {block.name: len(block) for block in run_blocks(model, blocks_of(model), [], "test")}
    assert found == dict.fromkeys(blocks_of(model), 0)


def test_a_block_that_runs_twice_is_refused():
    class Looped(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(4, 4)

        def forward(self, x):
            return self.block(self.block(x))

    with pytest.raises(ValueError, match="block runs more than once"):
        next(run_blocks(Looped(), ["block"], [torch.randn(2, 4)], "test"))


def test_equal_arguments_of_batches_are_kept_once(build):
    model = build()
    names = blocks_of(model)
    same = [torch.randint(3, 64, (1, 12)) for _ in range(4)]
    blocks = run_blocks(model, names, same, "test")
    block = next(blocks)
    calls = [block._arguments.get(index, names[0]) for index in range(len(block))]
    cosines = {kwargs["position_embeddings"][0].data_ptr() for _, kwargs in calls}
    assert len(cosines) == 1


@pytest.mark.parametrize("limit", LIMITS)
def test_masks_of_batches_wait_with_the_hidden_states(build, limit):
    model = build()
    names = blocks_of(model)
    ids = torch.randint(3, 64, (3, 12))
    masks = torch.ones_like(ids)
    for row, padding in enumerate((1, 4, 7)):
        masks[row, -padding:] = 0
    batches = [
        {"input_ids": i[None], "attention_mask": m[None]} for i, m in zip(ids, masks, strict=True)
    ]
    expected = seen_by(model, names, batches)
    equal(run(model, names, batches, limit=limit), expected)
    blocks = run_blocks(model, names, batches, "test", limit=limit)
    block = next(blocks)
    held = [v for v in block._arguments.store.tensors.values() if isinstance(v, torch.Tensor)]
    assert len(block._arguments.store) >= 3 and bool(held) == bool(limit)
