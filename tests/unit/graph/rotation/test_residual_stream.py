"""The residual stream of small decoders, and proofs that fail whatever is left out."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.graph.aliases import Aliases
from quark.torch.graph.discovery import discover
from quark.torch.graph.rotation.proof import prove_stream
from quark.torch.graph.rotation.residual_stream import Analysis, ObstacleError, find_stream
from quark.torch.graph.rotation.vector_flow import VectorFlow
from quark.torch.graph.trace import trace

IDS = torch.arange(2, 26).view(2, 12)


class Block(nn.Module):
    """One function of the block and the stream."""

    def __init__(self, function, norm):
        super().__init__()
        self.norm = norm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        if "gate" in function.__code__.co_names:
            self.gate = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


class Decoder(nn.Module):
    """Embeddings, two blocks, a norm and a head."""

    def __init__(self, function, norm=nn.RMSNorm, start=lambda m, x: x):
        super().__init__()
        self.table, self.first = nn.Embedding(26, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block(function, norm) for _ in range(2))
        self.last, self.head = norm(8), nn.Linear(8, 26, bias=False)
        self.start = start
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter.detach(), mean=0.4, std=0.3)

    def forward(self, ids):
        x = self.start(self, self.table(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def mlp(m, x):
    return x + m.down(m.up(m.norm(x)).relu())


def routed(m, x):
    rows = m.norm(x).view(-1, 8)
    out = torch.zeros_like(rows)
    for e in (0, 1):
        index = (torch.arange(len(rows)) % 2 == e).nonzero().flatten()
        part = m.down(m.up(rows[index]).relu()) * rows[index].sum(-1, keepdim=True).sigmoid()
        out.index_add_(0, index, part if e else part * 2)
    return x + out.view_as(x)


def by_hand(m, x):
    y = x - x.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return x + m.down(m.up(m.scale * y).relu())


ROTATE = {
    "norm before": mlp,
    "no norm": lambda m, x: x + m.down(m.up(x).relu()),
    "scalars": lambda m, x: 0.5 * x + 3 * m.down(m.up(m.norm(x) / 2).relu()),
    "written in place": lambda m, x: m.down(m.up(m.norm(x)).relu()).add_(x),
    "gain on its own": lambda m, x: x + m.down(m.up(x * (1 + m.scale)).relu()),
    "norm by hand": by_hand,
    "parallel": lambda m, x: x + m.down(m.up(m.norm(x)).relu()) + m.gate(m.norm(x)),
    "constant added": lambda m, x: x + m.scale + m.down(m.up(m.norm(x)).relu()),
}
REFUSE = {
    "norm after": (lambda m, x: x + m.norm(m.down(m.up(x).relu())), "added to the output of"),
    "norm of the sum": (lambda m, x: m.norm(mlp(m, x)), "is multiplied by another tensor"),
    "channels scaled": (lambda m, x: x * m.scale + m.down(m.up(x)), "added to the output of"),
    "channels gated": (lambda m, x: x * m.gate(x).sigmoid(), "is multiplied by another tensor"),
    "nonlinearity": (lambda m, x: x + x.tanh(), "goes through tanh"),
    "order of channels": (lambda m, x: x + x.flip(-1), "is added to another tensor"),
    "part of the channels": (
        lambda m, x: mlp(m, x) + F.pad(x[..., :4], (0, 4)),
        "goes through constant_pad_nd",
    ),
    "constant in a weight": (
        lambda m, x: x + F.linear(m.norm(x), m.gate.weight + 1),
        "goes through mm",
    ),
    "function of a gain": (
        lambda m, x: x + m.down(m.up(F.layer_norm(x, (8,), m.scale.exp()))),
        "goes through native_layer_norm",
    ),
    "largest channel": (lambda m, x: x + x.amax(-1, keepdim=True), "goes through amax"),
    "input that is no stream": (lambda m, x: x + x.shape[-1], "is added to another tensor"),
}


@pytest.mark.parametrize("case", ROTATE)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_streams_that_rotate(unchanged, case, norm):
    model = Decoder(ROTATE[case], norm)
    with unchanged(model):
        structure = discover(model, IDS)
    stream = structure.stream
    assert stream is not None, structure.obstacle
    assert structure.blocks == ("blocks.0", "blocks.1")
    assert [w.parameter for w in stream.embeddings] == ["table.weight"]
    assert {w.parameter for w in stream.writers} >= {f"blocks.{i}.down.weight" for i in (0, 1)}
    assert {w.parameter for w in stream.readers} >= {"blocks.1.up.weight", "head.weight"}
    assert (stream.size, stream.head, stream.tied) == (8, "head", False)


def test_rows_that_are_sent_to_experts():
    structure = discover(Decoder(routed), IDS)
    assert structure.stream is None
    assert "goes through sum" in structure.obstacle  # of all channels, which a rotation changes


@pytest.mark.parametrize("case", REFUSE)
def test_streams_that_do_not_rotate(case):
    function, said = REFUSE[case]
    structure = discover(Decoder(function), IDS)
    assert structure.stream is None
    assert said in structure.obstacle


def test_a_norm_of_embeddings_that_starts_the_stream():
    structure = discover(Decoder(mlp, start=lambda m, x: m.first(x)), IDS)
    assert structure.stream is None
    assert "is multiplied by another tensor in blocks.0.norm" in structure.obstacle


def test_a_branch_that_was_not_taken_may_read_the_stream():
    model = Decoder(lambda m, x: mlp(m, x) if len(x) < 9 else mlp(m, x + m.gate(x)))
    assert "gate.weight was not read" in discover(model, IDS).obstacle


def test_without_blocks_there_is_no_stream(net, data):
    structure = discover(net(lambda m, x: m.a(x), a=nn.Linear(6, 6)), data)
    assert (structure.stream, structure.obstacle) == (None, "there are no repeated blocks")


@pytest.fixture
def judge(build, unchanged):
    """Prove the stream of a model after a change, and return what the proof says."""

    def judge(kind, change, dtype=torch.float32):
        model = build(kind, dtype, use_cache=False)
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                nn.init.normal_(parameter.detach(), mean=0.5, std=0.2)
        run = lambda: model(IDS)  # noqa: E731
        seen = trace(model, run)
        aliases = Aliases(seen)
        stream, carried = find_stream(Analysis(seen, aliases, VectorFlow(seen, aliases), {}))
        with unchanged(model):
            try:
                prove_stream(model, run, seen.blocks, change(stream), carried)
            except ObstacleError as error:
                return str(error)
        return ""

    return judge


def dropped(part, ending):
    """Leave out a weight of a part of the stream."""

    def change(stream):
        weights = getattr(stream, part)
        kept = tuple(w for w in weights if not w.parameter.endswith(ending))
        assert len(kept) == len(weights) - 1
        return replace(stream, **{part: kept})

    return change


def other_norms(**changes):
    """Change all norms."""
    return lambda s: replace(s, norms=tuple(replace(norm, **changes) for norm in s.norms))


@pytest.mark.parametrize("kind", ["llama", "tied", "opt", "gemma", "cohere"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nothing_is_noticed_where_nothing_is_left_out(judge, kind, dtype):
    assert judge(kind, lambda stream: stream, dtype) == ""


@pytest.mark.parametrize(
    ("kind", "change", "where"),
    [
        ("llama", dropped("writers", "1.mlp.down_proj.weight"), "model.layers.1"),
        ("llama", dropped("readers", "0.self_attn.k_proj.weight"), "model.layers.0"),
        ("llama", dropped("embeddings", "embed_tokens.weight"), "the part around"),
        ("llama", dropped("readers", "lm_head.weight"), "the part around"),
        ("tied", lambda stream: replace(stream, tied=False), "the part around"),
        ("gemma", other_norms(offset=0.0), "the part around"),
        ("opt", dropped("biases", "0.fc2.bias"), "model.decoder.layers.0"),
        ("opt", dropped("embeddings", "embed_positions.weight"), "the part around"),
        ("opt", other_norms(bias=None), "the part around"),
        ("opt", other_norms(kind="rms"), "the part around"),
        (
            "llama",
            lambda s: replace(
                s, value_heads=tuple(replace(v, columns=v.rows) for v in s.value_heads)
            ),
            "model.layers.0",
        ),
    ],
)
def test_what_is_left_out_is_noticed(judge, kind, change, where):
    assert judge(kind, change).startswith(f"rotating {where}")
