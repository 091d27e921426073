"""Experts that receive inputs for every expert, those of Llama 4, as linear layers of their own."""

import copy

import pytest
import torch
from torch import nn

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.quantization.nn.expert_tokens import all_experts_observed, count_tokens
from quark.torch.quantization.nn.experts import is_stacked, split_experts, stack_experts
from quark.torch.quantization.nn.grouped_experts import GroupedExperts, chosen_experts
from quark.torch.quantization.nn.padding import padding
from tests.models.architectures import build, small_config, tokens

EXPERTS = 4


class Experts(nn.Module):
    """As in Llama 4, with 8 channels inside and 16 outside."""

    def __init__(self, product=torch.bmm):
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 16, 16))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 8, 16))
        self.product = product

    def forward(self, hidden_states):
        x = hidden_states.view(self.gate_up_proj.shape[0], -1, 16)
        gate, up = self.product(x, self.gate_up_proj).chunk(2, -1)
        return self.product(up * gate.sigmoid(), self.down_proj).view(-1, 16)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.experts = Experts(**options)

    def forward(self, x):
        return self.experts(x)


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def model(seeded):
    return Model()


def sent(choices):
    """Inputs of tokens that each go to some experts, as (experts * tokens, 16)."""
    x = torch.randn(len(choices), 16)
    rows = [[e in own for own in choices] for e in range(EXPERTS)]
    return (x * torch.tensor(rows).unsqueeze(-1)).flatten(0, 1)


CHOICES = [[0], [2], [2], [0], [3]]


class TestSplit:
    @pytest.fixture(autouse=True)
    def without_gradients(self):
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("product", [torch.bmm, torch.matmul, torch.Tensor.bmm])
    def test_function_is_kept(self, seeded, product):
        model, x = Model(product=product), sent(CHOICES)
        before = model(x)
        split_experts(model)
        assert isinstance(model.experts, GroupedExperts)
        torch.testing.assert_close(model(x), before)

    def test_layers_are_views_of_the_stacks(self, model):
        gate_up, down = model.experts.gate_up_proj, model.experts.down_proj
        split_experts(model)
        for expert in range(EXPERTS):
            gate, up, own_down = (
                model.get_submodule(f"experts.{expert}.{part}").weight
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            assert torch.equal(gate, gate_up[expert, :, :8].T)
            assert torch.equal(up, gate_up[expert, :, 8:].T)
            assert torch.equal(own_down, down[expert].T)
            assert gate.untyped_storage().data_ptr() == gate_up.untyped_storage().data_ptr()

    def test_undone(self, model):
        before, state = model(sent(CHOICES)), copy.deepcopy(model.state_dict())
        stack_experts(split_experts(model))
        assert type(model.experts) is Experts
        assert state.keys() == model.state_dict().keys()
        assert "shapes" not in vars(model.experts) and before.shape == (20, 16)

    def test_a_copy_has_layers_of_its_own(self, model):
        split_experts(model)
        x, other = sent(CHOICES), copy.deepcopy(model)
        before = model(x)
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(x).any() and torch.equal(model(x), before)

    def test_experts_run_on_their_tokens(self, model):
        split_experts(model)
        seen = []
        for expert in range(EXPERTS):
            layer = model.get_submodule(f"experts.{expert}.down_proj")
            layer.register_forward_hook(lambda m, args, y: seen.append(len(args[0])))
        model(sent(CHOICES))
        assert seen == [2, 0, 2, 1]

    def test_another_operation_is_refused(self, seeded):
        model = Model(product=lambda x, w: torch.einsum("eti,eio->eto", x, w))
        split_experts(model)
        with pytest.raises(NotImplementedError, match=r"to einsum, not to torch\.bmm"):
            model(sent(CHOICES))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "num_experts", 5),
        lambda x: setattr(x, "down_proj", nn.Parameter(torch.randn(EXPERTS, 9, 16))),
        lambda x: setattr(x, "down_proj", nn.Parameter(torch.randn(8, 16))),
        lambda x: setattr(x, "bias", nn.Parameter(torch.randn(EXPERTS, 16))),
        lambda x: setattr(
            x, "__class__", type("Routed", (Experts,), {"forward": lambda s, x, i: x})
        ),
    ],
    ids=["experts", "width", "matrix", "bias", "arguments"],
)
def test_other_layers_are_not_split(model, change):
    assert is_stacked(model.experts)
    change(model.experts)
    assert not is_stacked(model.experts)


class TestTokens:
    def test_counted(self, model):
        split_experts(model)
        mask = torch.tensor([True, True, False, True, True])
        for batch in range(2):
            with count_tokens(model, batch), padding(mask):
                model(sent(CHOICES))
        assert model.experts.tokens == [4, 0, 2, 2]

    def test_all_experts_observe_all(self, model):
        split_experts(model)
        seen = {expert: [] for expert in range(EXPERTS)}
        for expert, own in seen.items():
            layer = model.get_submodule(f"experts.{expert}.up_proj")
            layer.register_forward_pre_hook(lambda m, args, own=own: own.append(args[0]))
        x = sent(CHOICES)
        before = model(x)
        for own in seen.values():
            own.clear()
        with all_experts_observed(model), count_tokens(model, 0):
            assert torch.equal(model(x), before)
        assert model.experts.tokens == [5] * EXPERTS
        expected = x.view(EXPERTS, 5, 16).sum(0)
        for own in seen.values():
            rows = torch.cat(own)
            assert sorted(rows.tolist()) == sorted(expected.tolist())

    @pytest.mark.parametrize("choices", [CHOICES, [[0, 1], [3, 1], [2, 0]]])
    def test_choices_are_told_by_the_inputs(self, seeded, choices):
        found = chosen_experts(sent(choices), EXPERTS)
        assert [sorted(own) for own in found.tolist()] == [sorted(own) for own in choices]


class TestLlama4:
    @pytest.fixture
    def llama4(self):
        return build(small_config("llama4_text", num_experts_per_tok=1), torch.float32)

    def test_experts_are_quantized(self, llama4):
        config = LLMTemplate.get("llama4_text").get_config("int4_wo_32", algorithm="gptq")
        batches = tokens().split(1)
        quantized = ModelQuantizer(config).quantize_model(llama4, batches)
        layers = {n for n, m in quantized.named_modules() if hasattr(m, "weight_quantizer")}
        parts = ("gate_proj", "up_proj", "down_proj")
        expected = {f"{e}.{part}" for e in range(4) for part in parts}
        prefix = "model.layers.1.feed_forward.experts."
        assert {n.removeprefix(prefix) for n in layers if n.startswith(prefix)} == expected
        assert sum(quantized.get_submodule(prefix[:-1]).tokens) == 48

    def test_compiled(self, llama4):
        split_experts(llama4)
        with torch.no_grad():
            expected = llama4(tokens()).logits
            compiled = torch.compile(llama4, backend="eager")
            torch.testing.assert_close(compiled(tokens()).logits, expected)
