"""The residual streams of the decoder architectures of Transformers are found, and rotate."""

import pytest
import torch
from torch import nn

from quark.torch.graph.discovery import discover
from quark.torch.quantization.nn.experts import split_experts
from tests.models.architectures import InDouble, build, inputs, small_config

# Architecture -> kind of its norms, whether its head is tied, (key-value heads, heads).
ROTATING = {
    "llama": ("rms", False, (2, 4)),
    "mistral": ("rms", False, (2, 4)),
    "qwen2": ("rms", False, (2, 4)),
    "qwen3": ("rms", False, (2, 4)),
    "gemma": ("rms", True, (2, 4)),
    "granite": ("rms", False, (2, 4)),
    "phi": ("layer", False, (2, 4)),
    "phi3": ("rms", False, (2, 4)),
    "opt": ("layer", True, (4, 4)),
    "gpt2": ("layer", True, (4, 4)),
    "gpt_neox": ("layer", False, (4, 4)),
    "gptj": ("layer", False, (4, 4)),
    "falcon": ("layer", True, (1, 4)),
    "stablelm": ("layer", False, (2, 4)),
    "cohere": ("layer", True, (2, 4)),
    "olmo": ("layer", False, (2, 4)),
    "starcoder2": ("layer", True, (2, 4)),
    "mixtral": ("rms", False, (2, 4)),
    "qwen2_moe": ("rms", False, (2, 4)),
    "qwen3_moe": ("rms", False, (2, 4)),
    "gpt_oss": ("rms", False, (2, 4)),
    "llama4_text": ("rms", False, (2, 4)),
    "deepseek_v2": ("rms", False, (4, 4)),
    "deepseek_v3": ("rms", False, (4, 4)),
    "qwen3_next": ("rms", False, None),
    "mamba": ("rms", True, None),
    "jamba": ("rms", False, (2, 4)),
    "dbrx": ("layer", False, None),
    "deepseek_v4": ("rms", False, None),  # several streams, which are read as one
    "megatron-bert": ("layer", True, (4, 4)),  # its head reads what is not of the stream
    "pegasus": ("layer", True, (4, 4)),  # attends to an encoder as well
    "whisper": ("layer", True, (4, 4)),
}
REFUSED = {
    "gemma2": "is added to the output of model.layers.0.post_attention_layernorm",
    "gemma3_text": "is added to the output of model.layers.0.post_attention_layernorm",
    "olmo2": "is added to the output of model.layers.0.post_attention_layernorm",
    "glm4": "is added to the output of model.layers.0.post_self_attn_layernorm",
    "minimax": "is added to the output of model.layers.0.input_layernorm",
    "bloom": "goes through native_layer_norm in transformer.h.0.input_layernorm",
    "rwkv": "goes through native_layer_norm in rwkv.blocks.0.ln1",
    "gemma3n_text": "goes through bmm",
    "bert": "is added to the output of bert.embeddings.LayerNorm",
    "ctrl": "is added to another tensor in transformer",
}
# Those of them that have heads of values, which may be rotated all the same.
VALUES = ("gemma2", "gemma3_text", "olmo2", "glm4", "bloom", "bert", "ctrl")


def structure_of(name):
    model = build(small_config(name, use_cache=False))
    split_experts(model)
    with InDouble():
        return model, discover(model, inputs(model))


def rotate_(model, stream, rotation):
    """Rotate a stream by the book: gains into readers, biases after them, then all axes."""
    if stream.tied:
        head = model.get_submodule(stream.head)
        head.weight = nn.Parameter(head.weight.detach().clone())
    norms = {norm.module: norm for norm in stream.norms}
    for reader in stream.readers:
        norm, weight = norms.get(reader.norm), model.get_parameter(reader.parameter)
        if norm is None:
            continue
        columns = weight.data.movedim(reader.axis, -1)
        if norm.bias:
            module = model.get_submodule(reader.parameter.rpartition(".")[0])
            added = columns @ model.get_parameter(norm.bias).data
            old = 0 if module.bias is None else module.bias.data
            module.bias = nn.Parameter(old + added)
        if norm.weight:
            columns *= model.get_parameter(norm.weight).data + norm.offset
    for norm in stream.norms:
        if norm.weight:
            model.get_parameter(norm.weight).data.fill_(1 - norm.offset)
        if norm.bias:
            model.get_parameter(norm.bias).data.zero_()
    for part in (stream.embeddings, stream.writers, stream.biases, stream.readers):
        for weight in part:
            vectors = model.get_parameter(weight.parameter).data.movedim(weight.axis, -1)
            turned = vectors.unflatten(-1, (-1, len(rotation))) @ rotation
            vectors.copy_(turned.flatten(-2))


def random_rotation(size, keeps_mean):
    """A rotation; if the mean is to be kept, of what is orthogonal to the vector of ones."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator)
    if not keeps_mean:
        return torch.linalg.qr(normal)[0]
    normal[:, 0] = 1
    basis = torch.linalg.qr(normal)[0]  # (size, size), the first column constant
    inner = torch.block_diag(torch.eye(1), torch.linalg.qr(normal[1:, 1:])[0]).double()
    return basis @ inner @ basis.T


@pytest.mark.parametrize("name", ROTATING)
@pytest.mark.sampled(3)
def test_a_rotated_stream_gives_the_same_logits(name):
    model, structure = structure_of(name)
    stream = structure.stream
    assert stream is not None, structure.obstacle
    kind, tied, heads = ROTATING[name]
    assert {norm.kind for norm in stream.norms} == {kind}
    assert (stream.size, stream.tied) == (64, tied)
    shapes = {(len(found.rows), len(found.columns)) for found in stream.value_heads}
    assert shapes == ({heads} if heads else set())
    with InDouble(), torch.no_grad():
        before = model(**inputs(model)).logits
        rotate_(model, stream, random_rotation(64, kind == "layer"))
        after = model(**inputs(model)).logits
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*(name for name in ROTATING if ROTATING[name][2]), *VALUES])
@pytest.mark.sampled(4)
def test_rotated_values_give_the_same_logits(name):
    model, structure = structure_of(name)
    assert structure.value_heads
    with InDouble(), torch.no_grad():
        before = model(**inputs(model)).logits
        for heads in structure.value_heads:
            rotation = random_rotation(heads.rows.shape[1], False)
            for (parameter, axis), places in [
                *((source, heads.rows) for source in heads.sources),
                (heads.output, heads.columns),
            ]:
                vectors = model.get_parameter(parameter).data.movedim(axis, -1)
                vectors[..., places] = vectors[..., places] @ rotation
        after = model(**inputs(model)).logits
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_stands_in_the_way_is_told(name):
    _, structure = structure_of(name)
    assert structure.stream is None
    assert REFUSED[name] in structure.obstacle


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama", "down_proj"),
        ("mixtral", "w2"),
        ("qwen2_moe", "down_proj"),
        ("deepseek_v3", "down_proj"),
        ("gemma2", "down_proj"),
        ("bloom", "dense_4h_to_h"),
        ("bert", "output.dense"),
        ("ctrl", "ffn.2"),
    ],
)
def test_online_rotations_may_be_put_before_what_ends_an_mlp(name, ends):
    model, structure = structure_of(name)
    assert set(structure.down_projections) == {
        n
        for n, m in model.named_modules()
        if n.endswith(f".{ends}") and "attention.output" not in n and hasattr(m, "weight")
    }
