"""Small models on disk, so that the documented examples run with only their model ids changed."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from quark.demo.text import model_directory


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def opt_dir(tmp_path_factory):
    """A random OPT with a tokenizer: tied embeddings, biases, LayerNorm."""
    path = tmp_path_factory.mktemp("opt") / "opt-125m"
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=2048,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        init_std=0.1,
    )
    OPTForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory):
    """A random Llama with grouped heads and a tokenizer."""
    path = tmp_path_factory.mktemp("llama") / "Llama-2-70b-chat-hf"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def one_block(tmp_path_factory):
    """The shipped model with its first block alone, and its tokenizer."""
    path = tmp_path_factory.mktemp("one_block") / "MODEL"
    model = AutoModelForCausalLM.from_pretrained(model_directory(), num_hidden_layers=1)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    return path


@pytest.fixture
def logits():
    """Logits of a model for a fixed input."""
    ids = torch.arange(24).view(2, 12) + 5

    def compute(model):
        with torch.no_grad():
            return model(ids).logits

    return compute
