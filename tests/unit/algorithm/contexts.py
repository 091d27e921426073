"""Contexts of small models for tests of rotations."""

from functools import partial

import torch

from quark.torch.graph.discovery import discover
from quark.torch.pipeline.context import Context
from quark.torch.quantization.calibration import settle_weights
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.experts import unfuse
from quark.torch.quantization.preparation import plan, prepare, quantized_layers
from tests.models.architectures import tokens


def switch_off(context):
    """Let the layers compute in float, as algorithms find them."""
    for layer in context.layers.values():
        for quantizer in layer.quantizers().values():
            quantizer.enabled = False


def context_of(model, name="mxfp4", exclude=("*lm_head", "*embed_out"), batches=None):
    """Prepare a model by a scheme with groups of 32 and look at its structure."""
    unfuse(model)
    structure = discover(model, tokens())
    config = Config(global_quant_config=scheme(name, 32), exclude=list(exclude))
    prepare(model, plan(model, config))
    layers = dict(quantized_layers(model))
    settle = partial(settle_weights, config=config)
    context = Context(model, layers, structure, batches or [tokens()], config, settle)
    switch_off(context)
    return context


@torch.no_grad()
def logits_of(model):
    """Logits for the same tokens each time."""
    return model(tokens(20)).logits
