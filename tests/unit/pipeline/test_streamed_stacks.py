"""Blocks that receive tensors computed between blocks, in memory and read from files in parts."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.export.checkpoint.files import CheckpointReader
from quark.torch.export.checkpoint.streamed_model import stream_tensors
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.model_pass import run_data
from quark.torch.pipeline.stacks import find_stacks
from quark.torch.quantization.config.algo import (
    AWQConfig,
    GPTQConfig,
    RotationConfig,
    SmoothQuantConfig,
    YaqaConfig,
)
from tests.configurations import config, groups, spec
from tests.unit.pipeline.test_runner import equal, run, seen_by

WIDTH, TOKENS = 32, 48


class Block(nn.Module):
    """Attention without a softmax and a feed-forward part; ``extra`` is added to the scores."""

    def __init__(self, makes_bias):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "vo")
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)
        self.positions = nn.Embedding(64, 1) if makes_bias else None

    def forward(self, x, extra=None):
        length = x.shape[1]
        if extra is None:
            place = torch.arange(length, device=x.device)
            extra = self.positions((place[:, None] - place).abs()).squeeze(-1)
        scores = (extra - length * torch.ones(length, length).triu(1)).softmax(-1)
        x = x + self.o_proj(scores @ self.v_proj(self.norm1(x)))
        x = x + self.down(nn.functional.silu(self.up(self.norm2(x))))
        return x, extra


class Decoder(nn.Module):
    """A language model of four blocks."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block(i == 0 or (kind == "anew" and i == 2)) for i in range(4))
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        x, extra = self.embed(input_ids), None
        for number, layer in enumerate(self.layers):
            x, extra = layer(x, extra)
            if self.kind == "computed" and number == 1:
                extra = 0.1 * x.float().pow(2).mean(-1).sqrt()[:, None] + extra
            if self.kind == "anew" and number == 1:
                extra = None
        return self.lm_head(self.norm(x))


# Kind of model -> the blocks of each stack.
KINDS = {"shared": [4], "anew": [3, 1], "computed": [2, 2]}
INT8 = spec("int8")
# Algorithm -> its options and the inputs of layers.
ALGORITHMS = {
    "gptq": (GPTQConfig(), None),
    "awq": (AWQConfig(), None),
    "smooth": (SmoothQuantConfig(), INT8),
    "yaqa": (YaqaConfig(), None),
    "rotation": (RotationConfig(), INT8),
}


class Aside(nn.Module):
    """A layer that returns the mean of its outputs beside them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, extra):
        y = x + (self.linear(x) + extra).tanh()
        return y, y.mean(-1, keepdim=True)


class Asides(nn.Module):
    """A model that computes, of the second output of each block, what the next one receives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Aside() for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, TOKENS)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, x):
        extra = torch.zeros(())
        for layer in self.layers:
            x, extra = layer(x, 2 * extra)
        return self.lm_head(x + extra)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, shape, generator=generator) for shape in ((2, 9), (3, 9), (1, 6))]


def streamed(kind, directory):
    """Return the model, read from files of which no part stays in memory."""
    save_file(Decoder(kind).state_dict(), directory / "model.safetensors")
    with torch.device("meta"):
        model = Decoder(kind)
    model = stream_tensors(model, CheckpointReader(directory))
    residency_of(model).limit = 0
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_stacks(kind, tmp_path):
    names = tuple(f"layers.{i}" for i in range(4))
    for model in (Decoder(kind).eval(), streamed(kind, tmp_path)):
        stacks = find_stacks(model, names, batches())
        assert [len(stack.names) for stack in stacks] == KINDS[kind]


def quantized(model, algorithm, data):
    options, inputs = ALGORITHMS[algorithm]
    quantizer = ModelQuantizer(config(groups("int4"), inputs, algo_config=[options]))
    return quantizer.freeze(quantizer.quantize_model(model, data))


@pytest.mark.parametrize("lengths", ["equal", "different"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.sampled(2, covers=True)
def test_results_are_those_in_memory(algorithm, kind, lengths, export, tmp_path):
    (tmp_path / "float").mkdir()
    data = batches() if lengths == "different" else [batch[:1, :6] for batch in batches()]
    models = Decoder(kind).eval(), streamed(kind, tmp_path / "float")
    if (algorithm, kind) == ("yaqa", "computed"):
        for model in models:
            with pytest.raises(
                ValueError, match=r"Gradients through these tensors are not followed"
            ):
                quantized(model, algorithm, data)
        return
    tensors, outputs = [], []
    for model in models:
        model = quantized(model, algorithm, data)
        with torch.no_grad():
            outputs.append(model(data[0]))
        tensors.append(load_file(export(model) / "model.safetensors"))
    assert outputs[0].equal(outputs[1])
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.equal(tensors[1][name]), name


def asides_data():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 5, WIDTH, generator=generator) for _ in range(3)]


class TestOutputsBesideHiddenStates:
    """The model computes with the tensors of each batch, not with those of the first one."""

    names = tuple(f"layers.{i}" for i in range(4))

    def test_blocks_receive_what_they_receive_in_the_model(self):
        model, data = Asides().eval(), asides_data()
        assert [len(s.names) for s in find_stacks(model, list(self.names), data)] == [1, 1, 1, 1]
        equal(run(model, list(self.names), data), seen_by(model, list(self.names), data))

    def test_outputs_of_a_pass_by_blocks(self, tmp_path):
        model, data, outputs = Asides().eval(), asides_data(), {}
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        with torch.device("meta"):
            parts = Asides()
        parts = stream_tensors(parts, CheckpointReader(tmp_path))
        residency_of(parts).limit = 0
        run_data(parts, data, "test", receive=outputs.__setitem__)
        with torch.no_grad():
            assert all(outputs[i].equal(model(batch)) for i, batch in enumerate(data))

    def test_gradients_through_them_are_refused(self):
        model = Asides().eval()
        with pytest.raises(ValueError, match=r"layers\.3 computes tensors from its inputs"):
            quantized(model, "yaqa", asides_data())
