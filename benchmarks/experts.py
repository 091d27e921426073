"""A mixture of experts for accuracy benchmarks: a small Mixtral, trained here on first use.

    python benchmarks/experts.py                      # ten CPU minutes, and its perplexity

It begins as the model of the package: each expert is a copy of the multilayer perceptron, with
noise, and routers are random (sparse upcycling, Komatsuzaki et al. 2023). Then it learns to predict
the docstrings that are not held out, with a loss that keeps experts in use. What it has learned is
kept in ``build/models``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kept_models import directory_of
from measure import say

from quark.demo.text import evaluation_documents, model_directory, training_documents
from quark.torch.evaluation.perplexity import perplexity, token_windows

EXPERTS, CHOSEN = 8, 2  # of a layer, and for a token
NOISE = 0.3  # of a copied weight, in units of its standard deviation
STEPS, TOKENS, LENGTH = 400, 1024, 256  # tokens in each step and in each sequence
RATE, WARMUP = 1e-3, 0.05
ALL_CHARACTERS = 1 << 30


def directory() -> Path:
    """Return the directory of the model and its tokenizer; train the model on first use."""
    return directory_of("experts", train)


def train() -> tuple[Any, Any]:
    """Return the trained model and the tokenizer."""
    from tqdm import tqdm
    from transformers import AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_directory())
    model = upcycled().train()
    text = token_windows(training_documents(ALL_CHARACTERS), tokenizer, LENGTH).flatten()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in tqdm(range(STEPS), desc="training", unit="step"):
        done = step / STEPS
        starts = torch.randint(len(text) - LENGTH, (TOKENS // LENGTH, 1))
        windows = text[starts + torch.arange(LENGTH)]
        loss = model(windows, labels=windows, output_router_logits=True).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, done / WARMUP, 1.0 - done)
        optimizer.step()
    return model.eval(), tokenizer


def upcycled() -> Any:
    """Return a Mixtral whose experts are noisy copies of the layers of the model of the package."""
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    dense: Any = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    shared = {
        name: value for name, value in dense.config.to_dict().items() if name in _SHARED_OPTIONS
    }
    model: Any = MixtralForCausalLM(
        MixtralConfig(**shared, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    )
    model.load_state_dict(dense.state_dict(), strict=False)  # all but the layers of experts
    for layer, source in zip(model.model.layers, dense.model.layers, strict=True):
        gate_up = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight]).detach()
        for stack, weight in (
            (layer.mlp.experts.gate_up_proj, gate_up),
            (layer.mlp.experts.down_proj, source.mlp.down_proj.weight.detach()),
        ):
            stack.data.copy_(weight + NOISE * weight.std() * torch.randn(EXPERTS, *weight.shape))
    return model


_SHARED_OPTIONS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rope_parameters"),
    *("rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    place = directory()
    model = AutoModelForCausalLM.from_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    windows = token_windows(evaluation_documents(), tokenizer, LENGTH, 32)
    say(f"perplexity on text that it has not seen: {perplexity(model, windows):.2f}")


if __name__ == "__main__":
    main()
