"""The modules that a file of rotations names are those that are found without it."""

import copy

import pytest
import torch
from torch import nn

from quark.torch.algorithm.rotation.config_file import stream_from_config
from quark.torch.algorithm.rotation.rotate import apply
from quark.torch.quantization.config.config import RotationConfig
from tests.models.architectures import build, small_config
from tests.unit.algorithm.contexts import context_of, logits_of

_LLAMA = "model.layers.layer_id"
_OPT = "model.decoder.layers.layer_id"
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def named(block, norms, gates, embeddings, out, down, last, head="lm_head"):
    """A file as it is documented, for two norms in each block."""

    def entry(before, norm, after):
        return {"prev_modules": before, "norm_module": norm, "next_modules": after}

    before = f"{block.replace('layer_id', 'pre_layer_id')}.{down}"
    attention = (f"{block}.{norms[0]}", [f"{block}.{name}" for name in _QKV])
    second = entry([f"{block}.{out}"], f"{block}.{norms[1]}", [f"{block}.{g}" for g in gates])
    return {
        "first_layer": [entry(embeddings, *attention), second],
        "middle_layers": [entry([before], *attention), second],
        "last_layer": [entry([f"{block}.{down}"], last, [head])],
    }


LLAMA = named(
    _LLAMA,
    ("input_layernorm", "post_attention_layernorm"),
    ("mlp.up_proj", "mlp.gate_proj"),
    ["model.embed_tokens"],
    "self_attn.o_proj",
    "mlp.down_proj",
    "model.norm",
)
OPT = named(
    _OPT,
    ("self_attn_layer_norm", "final_layer_norm"),
    ("fc1",),
    ["model.decoder.embed_tokens", "model.decoder.embed_positions"],
    "self_attn.out_proj",
    "fc2",
    "model.decoder.final_layer_norm",
)
FILES = {
    "llama": {"scaling_layers": LLAMA},
    "gemma": {"scaling_layers": LLAMA},
    "qwen2": {"scaling_layers": LLAMA},
    "opt": {
        "scaling_layers": OPT,
        "model_decoder_layers": "model.decoder.layers",
        "o_proj": "self_attn.out_proj",
    },
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_named_is_what_is_found(name):
    models = [build(small_config(name)) for _ in range(2)]
    for model, written in zip(models, ({}, FILES[name]), strict=True):
        apply(context_of(model), RotationConfig(r2=True, r4=True, **written))
    found, named = (model.state_dict() for model in models)
    assert found.keys() == named.keys()
    for key, value in found.items():
        torch.testing.assert_close(named[key], value, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", FILES)
def test_norms_are_told_apart(name):
    stream = stream_from_config(build(small_config(name)), RotationConfig(**FILES[name]))
    assert {norm.kind for norm in stream.norms} == {"layer" if name == "opt" else "rms"}
    assert {norm.offset for norm in stream.norms} == {1.0 if name == "gemma" else 0.0}
    assert len(stream.norms) == 5 and stream.size == 64


def test_a_model_of_one_block():
    model = build(small_config("llama", num_hidden_layers=1), torch.float32)
    context = context_of(model)
    expected = logits_of(model)
    apply(context, RotationConfig(scaling_layers=LLAMA, r2=True))
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)


def changed(part, key, value):
    layers = copy.deepcopy(LLAMA)
    layers[part][0][key] = value
    return {"scaling_layers": layers}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scaling_layers": [1]}, "must be an object with first_layer"),
        ({"scaling_layers": {"layers": [{}]}}, "must be an object with first_layer"),
        ({"scaling_layers": {"first_layer": [{}]}}, "entry of first_layer needs prev_modules"),
        (changed("first_layer", "prev_modules", "model.embed_tokens"), "lists of names"),
        ({"scaling_layers": {"middle_layers": []}}, "must be an object with first_layer"),
        (changed("first_layer", "norm_module", "model.nor"), "'model.nor'. Did you mean"),
        (changed("first_layer", "next_modules", ["model.norm"]), "has no weight with two axes"),
        (
            changed("last_layer", "next_modules", [f"{_LLAMA}.mlp.down_proj"]),
            r"down_proj\.weight of shape \(64, 96\) does not fit the residual stream: axis 1",
        ),
        (changed("last_layer", "norm_module", "lm_head"), "norm_module lm_head has no weight"),
        ({"scaling_layers": LLAMA, "model_decoder_layers": "layers"}, "no module 'layers'"),
        ({"scaling_layers": LLAMA, "v_proj": "self_attn.v"}, "no module .*Did you mean"),
    ],
    ids=[
        "list",
        "keys",
        "entry",
        "no list",
        "empty",
        "name",
        "vector",
        "width",
        "norm",
        "decoder",
        "values",
    ],
)
def test_files_that_do_not_fit(options, said, unchanged):
    context = context_of(build(small_config("llama")))
    with unchanged(context.model), pytest.raises(ValueError, match=said):
        apply(context, RotationConfig(r2=True, **options))


def test_entries_are_objects():
    with pytest.raises(
        TypeError, match=r"scaling_layers\.first_layer\[0\]: expected a dict, got 1"
    ):
        RotationConfig(scaling_layers={"first_layer": [1]})


class Scale(nn.LayerNorm):
    def forward(self, x):
        return x * self.weight


def test_a_norm_that_is_none():
    model = build(small_config("llama"))
    model.model.norm = Scale(64)
    with pytest.raises(ValueError, match=r"model\.norm \(Scale\) is neither an RMS norm"):
        stream_from_config(model, RotationConfig(scaling_layers=LLAMA))
