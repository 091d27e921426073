"""Every algorithm, and one architecture of each family."""

import pytest
import torch

from quark.torch import collect_statistics
from quark.torch.algorithm.registry import ALGORITHMS
from quark.torch.quantization.config.algo import ALGO_CONFIGS
from tests.configurations import preset, quantized, quantized_by
from tests.models.architectures import VARIED, build, inputs, small_config, tokens, varied

pytestmark = pytest.mark.smoke
OPTIONS = {
    "autoround": {"iters": 2},
    "blockwise_joint_tuning": {"epochs": 1},
    "rotation": {"r2": True, "r4": True},
    "sparsegpt": {"mask_structure": "unstructured", "sparsity": 0.2},
    "wanda": {"mask_structure": "unstructured", "sparsity": 0.2},
    "svdquant": {"svd_rank": 4, "min_layer_size": 0},
}
CHANGES = {"bias_correction": {"attention_bias": True}}  # of the model
# Beside decoders: state spaces, a hybrid, an encoder with a decoder, images beside text.
FAMILIES = ["mamba2", "jamba", "whisper", "gemma3"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm(name):
    """The scheme quantizes weights by 4 bits, and inputs, so that every algorithm serves it."""
    options = ALGO_CONFIGS[name](**OPTIONS.get(name, {}))
    model = varied("llama", num_hidden_layers=1, **CHANGES.get(name, {}))
    with torch.no_grad():
        expected = model(tokens()).logits
        quantized_by(model, "w_uint4_per_group_a_int8_per_tensor", options, data=[tokens()])
        result = model(tokens()).logits
    assert 0 < (result - expected).norm() < 0.5 * expected.norm()


@pytest.mark.parametrize("name", [*VARIED, *FAMILIES])
def test_an_architecture(name):
    if name in VARIED:
        model = varied(name)
    else:
        model = build(small_config(name, use_cache=False), torch.float32)
    given = inputs(model)
    with torch.no_grad():
        expected = model(**given).logits
        model = quantized(model, preset("ptpc_int8", exclude=("*head*", "embed_out")), [given])
        result = model(**given).logits
    assert 0 < (result - expected).norm() < 0.5 * expected.norm()


def test_statistics():
    statistics = collect_statistics(varied("llama", num_hidden_layers=1), [tokens()])
    assert len(statistics.readers) == 7
