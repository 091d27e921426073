"""Contexts of small models for tests of rotations."""

from functools import partial

import torch

from quark.torch.graph.discovery import discover
from quark.torch.pipeline.context import Context
from quark.torch.quantization.calibration import compute_weight_scales
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.experts import split_experts
from quark.torch.quantization.preparation import quantized_layers, replace_layers, select_layers
from tests.models.architectures import tokens, varied


def switch_off(context):
    """Let the layers compute in float, as algorithms find them."""
    for layer in context.layers.values():
        for quantizer in layer.quantizers().values():
            quantizer.enabled = False


def context_of(model, name="mxfp4", exclude=("*lm_head", "*embed_out"), batches=None):
    """Prepare a model by a scheme with groups of 32 and look at its structure."""
    split_experts(model)
    structure = discover(model, tokens())
    config = Config(global_quant_config=scheme(name, 32), exclude=list(exclude))
    replace_layers(model, select_layers(model, config))
    layers = dict(quantized_layers(model))
    compute_scales = partial(compute_weight_scales, config=config)
    context = Context(model, layers, structure, batches or [tokens()], config, compute_scales)
    switch_off(context)
    return context


@torch.no_grad()
def logits_of(model):
    """Logits for the same tokens each time."""
    return model(tokens(20)).logits


def outliers(factor=60.0):
    """A model with channels of norms turned up, and what reads them turned down."""
    model = varied("llama")
    channels = torch.tensor([3, 17, 40])
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
                (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
            ):
                norm.weight[channels] *= factor
                for reader in readers:
                    reader.weight[:, channels] /= factor
    return model
