"""GGUF files in llama.cpp, where llama-cpp-python is installed."""

import numpy as np
import pytest
import torch

from quark.demo.text import model_directory
from quark.torch import ModelExporter
from tests.configurations import config, half_groups
from tests.unit.export.gguf.mixtures import MIXTURES, changes_of
from tests.unit.export.gguf.rewriting import write_gguf

pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")
VOCABULARY = 2048  # of the tokenizer
IDS = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def predicted(model):
    return model(IDS, use_cache=False).logits[0].log_softmax(-1)


def predicted_by_llama_cpp(path):
    ids = IDS[0].tolist()
    given = {"n_ctx": len(ids), "n_batch": len(ids), "n_threads": 1, "logits_all": True}
    in_float = {"type_k": 0, "type_v": 0, "flash_attn": False}
    model = llama_cpp.Llama(str(path), **given, **in_float, verbose=False)
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)])).log_softmax(-1)


@pytest.fixture
def made(build, quantize, tmp_path):
    def made(kind, **changes):
        model = build(kind, vocab_size=VOCABULARY, **changes)
        model = quantize(model, config(half_groups("int4")), None)
        ModelExporter(tmp_path).export_gguf_model(model, model_directory(), "small")
        return model, tmp_path / "small.gguf"

    return made


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
DENSE = {
    "llama": {"rope_parameters": {"rope_theta": 10000.0, **YARN}},
    "granite": {**GRANITE, "logits_scaling": 2.0},
    "olmo2": {"pad_token_id": None},
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": None},  # the last one has no rotation
}


@pytest.mark.parametrize("kind", [*DENSE, *MIXTURES])
def test_weights_in_float(made, tmp_path, kind):
    """The choices of the routers are the same, as inputs stay in float too."""
    model, path = made(kind, **(changes_of(kind) if kind in MIXTURES else DENSE[kind]))
    write_gguf(tmp_path / "float.gguf", path, {"weight": "F32"})
    found = predicted_by_llama_cpp(tmp_path / "float.gguf")
    torch.testing.assert_close(found, predicted(model), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", [*DENSE, *MIXTURES])
def test_blocks(made, kind):
    """llama.cpp rounds inputs to 8 bits. All experts are used, so that no choice depends on it."""
    used = changes_of(kind, num_experts_per_tok=4) if kind in MIXTURES else DENSE[kind]
    model, path = made(kind, **used)
    difference = (predicted_by_llama_cpp(path) - predicted(model)).abs()
    assert difference.median() < 0.05 * predicted(model).std()
