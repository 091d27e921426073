"""Rotations of inputs in each forward pass, alone, beside merged ones, and after factors."""

import pytest
import torch

from quark.torch import ModelImporter, load_params, save_params
from quark.torch.algorithm.rotation.rotate import apply
from quark.torch.export.recognition import load_checkpoint, load_in_float
from quark.torch.quantization.config.algo import (
    GPTQConfig,
    OnlineRotationConfig,
    RotationConfig,
    SVDQuantConfig,
)
from tests.configurations import preset, quantized, quantized_by
from tests.models.architectures import tokens, varied
from tests.unit.algorithm.contexts import context_of, logits_of, outliers

BATCHES = [tokens(40), tokens(60)]
READER = "model.layers.0.self_attn.q_proj"


def options(*layers, prescale=False, **rest):
    online = OnlineRotationConfig(online_rotation_layers=list(layers), use_input_prescale=prescale)
    return RotationConfig(**{"r1": False, "rotation_size": 32, "online_config": online, **rest})


@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("merged", [{}, {"r1": True, "r2": True}], ids=["alone", "beside R1 R2"])
def test_the_model_computes_the_same(merged, prescale):
    """With R1, inputs x R1 are rotated once more, and the weight W R1 too."""
    context = context_of(outliers())
    expected = logits_of(context.model)
    apply(context, options("*", prescale=prescale, **merged))
    torch.testing.assert_close(logits_of(context.model), expected, rtol=1e-3, atol=1e-4)
    assert all(layer.input_rotation is not None for layer in context.layers.values())
    shared = [context.layers[READER.replace("q_proj", n)] for n in ("q_proj", "k_proj", "v_proj")]
    assert all((layer.input_prescale is not None) is prescale for layer in shared)
    if prescale:
        first, *others = (layer.input_prescale for layer in shared)
        assert all(torch.equal(first, other) for other in others)
        assert (
            bool(merged) or float((first.max() / first.min()).detach()) > 4
        )  # R1 spreads outliers


def test_patterns_select_linear_layers():
    context = context_of(varied("llama"), exclude=())
    apply(context, options("*.mlp.*", READER, READER))
    rotated = {n for n, layer in context.layers.items() if layer.input_rotation is not None}
    mlp = {f"model.layers.{i}.mlp.{n}_proj" for i in range(2) for n in ("gate", "up", "down")}
    assert rotated == {READER, *mlp}
    with pytest.raises(ValueError, match=r"has '\*.experts.\*', which is not a quantized layer"):
        apply(context_of(varied("llama")), options("*.experts.*"))


def error(model, expected):
    return float((logits_of(model) - expected).norm() / expected.norm())


def test_outliers_cost_less():
    expected = logits_of(outliers(8.0))
    plain, rotated, scaled = (
        error(quantized_by(outliers(8.0), "mxfp4", *given, data=BATCHES), expected)
        for given in ((), (options("*"),), (options("*", prescale=True),))
    )
    assert scaled < 0.7 * rotated < 0.7 * plain


def test_gptq_rounds_for_rotated_inputs():
    expected = logits_of(varied("llama"))
    plain, solved = (
        error(quantized_by(varied("llama"), "mxfp4", *given, data=BATCHES), expected)
        for given in ((), (options("*", prescale=True), GPTQConfig()))
    )
    assert solved < plain


def test_learned_rotations_of_a_reader_are_refused(unchanged):
    model = varied("llama")
    config = preset("mxfp4", options("*", r1=True, trainable=True))
    with unchanged(model), pytest.raises(ValueError, match="leave it out of online_rotation"):
        quantized(model, config, BATCHES)


@pytest.mark.parametrize("branches", [False, True])
def test_every_file_gives_the_same_bits(branches, build, export, tmp_path):
    """A branch beside rotated inputs has factors of its own where inputs have none."""
    added = [SVDQuantConfig(svd_rank=4, min_layer_size=0, exclude_patterns=["*k_proj"])]
    given = options("*.mlp.*" if branches else "*", prescale=not branches)
    config = preset("mxfp4", given, *added[: int(branches)])
    model = quantized(build("llama"), config, BATCHES)
    path = export(model)
    save_params(model, "llama", export_dir=tmp_path / "out")
    files = {"json_path": "llama.json", "safetensors_path": "llama.safetensors"}
    paths = {key: tmp_path / "out" / name for key, name in files.items()}
    for read in (
        load_checkpoint(path),
        load_checkpoint(path, max_memory=1 << 40),
        ModelImporter(path, "safetensors").import_model_info(build("llama", device="meta")),
        load_params(build("llama"), **paths),
    ):
        assert torch.equal(logits_of(read), logits_of(model))


def test_a_merged_model_has_plain_weights(build, export):
    config = preset("w_int4_per_channel_sym", options("*", prescale=True))
    model = quantized(build("llama"), config, BATCHES)
    merged = load_in_float(export(model))
    assert not [n for n in merged.state_dict() if "rotation" in n or "prescale" in n]
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=1e-3, atol=1e-4)
