"""Addresses of parameters do not matter: they begin at multiples of 64 bytes where data runs."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from quark.torch import collect_statistics, save_statistics
from quark.torch.graph.alignment import BOUNDARY, align_parameters, aligned, is_aligned
from quark.torch.graph.residency import resident
from quark.torch.pipeline.memory_limit import MemoryLimit
from quark.torch.pipeline.residency import Residency
from quark.torch.pipeline.scratch import Scratch
from quark.torch.quantization.config.algo import AWQConfig, QronosConfig, YaqaConfig
from tests.configurations import preset, quantized


def at(offset, x):
    """A copy of a tensor that begins some bytes after a multiple of 64."""
    room = torch.empty(x.numel() * x.itemsize + 2 * BOUNDARY, dtype=torch.uint8)
    start = -room.data_ptr() % BOUNDARY + offset
    moved = room[start : start + x.numel() * x.itemsize].view(x.dtype).view(x.shape)
    assert moved.copy_(x).data_ptr() % BOUNDARY == offset
    return moved


def moved(model, offset):
    """A copy of a model whose parameters begin at other addresses."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = at(offset, parameter.data)
    return other


def test_an_aligned_tensor_is_itself():
    x = torch.randn(3, 5)
    assert aligned(x) is x


@pytest.mark.parametrize("offset", [8, 24, 32, 56])
def test_another_tensor_is_copied(offset):
    x = at(offset, torch.randn(3, 5))
    assert not is_aligned(x)
    y = aligned(x)
    assert is_aligned(y)
    assert torch.equal(x, y)


def test_strides_stay():
    whole = at(8, torch.randn(6, 4))
    x = whole.t()[:, :3]
    y = aligned(x)
    assert is_aligned(y)
    assert y.stride() == x.stride()
    assert torch.equal(x, y)


def test_parameters_stay_the_same_objects():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model = moved(model, 8)
    before = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    align_parameters(model)
    assert model[1].weight is model[0].weight
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert is_aligned(parameter)
        assert torch.equal(parameter, values[name])


def test_parameters_that_share_memory_stay_where_they_are():
    whole = at(8, torch.zeros(40))
    model = nn.Module()
    model.first = nn.Parameter(whole[:24])
    model.second = nn.Parameter(whole[16:32])
    model.buffered = nn.Parameter(whole[32:36])
    model.register_buffer("buffer", whole[33:40])
    model.alone = nn.Parameter(at(8, torch.ones(4)))
    align_parameters(model)
    assert is_aligned(model.alone)
    with torch.no_grad():
        model.first[16:] = 1
        model.buffered[1:] = 2
    assert model.second.tolist() == [1] * 8 + [0] * 8
    assert model.buffer.tolist() == [2] * 3 + [0] * 4


@pytest.fixture(scope="module")
def experts():
    """A mixture of experts with a gate of one row, and experts that few tokens reach."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        num_experts=6,
        num_experts_per_tok=2,
        vocab_size=99,
    )
    return Qwen2MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(1)
    return [torch.randint(0, 99, (1, length)) for length in (32, 24, 17, 17, 9, 33)]


@pytest.mark.parametrize("algorithm", [AWQConfig, QronosConfig, YaqaConfig])
def test_a_quantized_model_does_not_depend_on_addresses(experts, batches, algorithm):
    config = preset("int4_wo_32", algorithm())
    expected = quantized(copy.deepcopy(experts), config, batches).state_dict()
    for offset in (8, 32):
        state = quantized(moved(experts, offset), config, batches).state_dict()
        assert not [name for name, x in state.items() if not torch.equal(x, expected[name])]


def test_statistics_do_not_depend_on_addresses(experts, batches, tmp_path):
    for name, model in (("first", copy.deepcopy(experts)), ("second", moved(experts, 8))):
        save_statistics(collect_statistics(model, batches), tmp_path / name)
    first, second = (
        {
            n: x
            for file in (tmp_path / name).glob("*.safetensors")
            for n, x in load_file(file).items()
        }
        for name in ("first", "second")
    )
    assert first
    assert first.keys() == second.keys()
    assert not [name for name, x in first.items() if not torch.equal(x, second[name])]


class Source:
    """Values of a model as a mapped file has them."""

    def __init__(self, model):
        self.values = {name: at(8, p.detach()) for name, p in model.named_parameters()}

    def read(self, names):
        return {name: self.values[name] for name in names}


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_parameters_that_are_read_begin_there_too(tmp_path, limit):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    source = Source(model)
    residency = Residency(model, source, MemoryLimit(limit, 0, None), Scratch(tmp_path))
    for _ in range(2):  # what was read ahead, and what was not
        for name in "0123":
            with resident(model, name):
                layer = model.get_submodule(name)
                assert is_aligned(layer.weight)
                assert is_aligned(layer.bias)
                assert torch.equal(layer.weight, source.values[f"{name}.weight"])
                with torch.no_grad():
                    layer.weight.mul_(1)
        residency.release()
