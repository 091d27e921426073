"""Fixtures that look inside of attention, and proofs of products for each test anew."""

import pytest
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quark.torch.quantization.nn.products import product
from tests.unit.quantization.nn.caches import IDS, logits_of


@pytest.fixture(autouse=True)
def no_proofs(monkeypatch):
    """Nothing is proved at first: tests change kernels, and what the machine can do."""
    monkeypatch.setattr(product, "_PROVED", set())


@pytest.fixture
def attention():
    """Register an attention function for the time of a test."""
    names = []

    def register(function):
        names.append(f"test-{len(names)}")
        AttentionInterface.register(names[-1], function)
        return names[-1]

    yield register
    for name in names:
        AttentionInterface._global_mapping.pop(name)


@pytest.fixture
def keys_of(attention, build):
    """What the attention modules of a float model take, by layer: queries, keys and values."""

    def keys_of(model, ids=IDS):
        seen = {}

        def look(module, query, key, value, *args, **kwargs):
            seen[module.layer_idx] = query, key, value
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

        model.set_attn_implementation(attention(look))
        logits_of(model, ids)
        model.set_attn_implementation("sdpa")
        return [seen[index] for index in sorted(seen)]

    return keys_of
