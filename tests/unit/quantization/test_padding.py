"""Padding is in no statistics: padded batches give what the same rows give one by one."""

from dataclasses import replace

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.algo import GPTQConfig, SmoothQuantConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from tests.models.architectures import build, small_config

LENGTHS = (5, 11, 8)
PAD = 63


def rows(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 60, (1, length), generator=generator) for length in LENGTHS]


def together(parts, side, prefix=""):
    """Rows as one batch, padded on a side."""
    longest = max(LENGTHS)
    ids, mask = torch.full((len(parts), longest), PAD), torch.zeros(len(parts), longest, dtype=int)
    for i, row in enumerate(parts):
        count = row.shape[1]
        where = slice(0, count) if side == "right" else slice(longest - count, longest)
        ids[i, where], mask[i, where] = row[0], 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}


def quantize(model, data, *algorithms):
    layer = scheme("int8")
    cache = replace(layer, output_tensors=layer.input_tensors)
    config = Config(
        layer,
        exclude=["lm_head", "*gate"],
        algo_config=list(algorithms) or None,
        kv_cache_quant_config={"*k_proj": cache, "*v_proj": cache},
    )
    with torch.no_grad():  # what padding gives is much larger
        model.get_input_embeddings().weight[PAD] *= 50
    return ModelQuantizer(config).quantize_model(model, data)


def scales(model):
    quantizers = {n: m for n, m in model.named_modules() if isinstance(m, TensorQuantizer)}
    return {n: q.scale for n, q in quantizers.items() if q.scale is not None}


def check_same(padded, alone):
    assert padded.keys() == alone.keys() and any("input_quantizer" in name for name in alone)
    for name, scale in alone.items():
        torch.testing.assert_close(padded[name], scale, rtol=2e-4, atol=0, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("algorithms", [(), (SmoothQuantConfig(),), (GPTQConfig(),)], ids=str)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.sampled(2, covers=True)
def test_a_decoder(name, algorithms, side):
    config = small_config(name, num_hidden_layers=1, attn_implementation="eager")
    alone = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows()]
    expected = scales(quantize(build(config), alone, *algorithms))
    check_same(scales(quantize(build(config), [together(rows(), side)], *algorithms)), expected)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_and_a_decoder(name):
    """Both have tensors of one shape, but masks of their own."""
    config = small_config(name, is_encoder_decoder=True, pad_token_id=PAD)
    sources, targets = rows(), rows(2)[::-1]
    alone = [
        {"input_ids": a, "attention_mask": torch.ones_like(a), "decoder_input_ids": b}
        for a, b in zip(sources, targets, strict=True)
    ]
    padded = together(sources, "right") | together(targets, "right", "decoder_")
    from transformers import AutoModelForSeq2SeqLM

    def model():
        torch.manual_seed(0)
        return AutoModelForSeq2SeqLM.from_config(config).eval()

    check_same(scales(quantize(model(), [padded])), scales(quantize(model(), alone)))


@pytest.mark.parametrize("is_boolean", [True, False])
def test_a_mask_of_four_axes(is_boolean):
    """Keys that no query reads are padding, whether the mask is boolean or is added."""
    batch = together(rows(), "right")
    count = batch["input_ids"].shape[1]
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    allowed = (causal & batch["attention_mask"].bool().unsqueeze(1)).unsqueeze(1)
    config = small_config("llama", num_hidden_layers=1, attn_implementation="sdpa")
    added = torch.where(allowed, 0.0, -torch.inf).to(build(config).dtype)
    mask = allowed if is_boolean else added
    expected = scales(quantize(build(config), [batch]))
    check_same(scales(quantize(build(config), [batch | {"attention_mask": mask}])), expected)
