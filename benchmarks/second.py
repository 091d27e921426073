"""A second architecture for accuracy benchmarks: a small GPT-2, trained here on first use.

    python benchmarks/second.py                       # eight CPU minutes, and its perplexity

It has what the model of the package lacks: layer norms and biases, learned positions, GELU, weights
with inputs along axis 0, query, key and value in one layer, and a head tied to the embedding. It
learns the predictions of the model of the package (Hinton et al. 2015, section 2), whose tokenizer
it shares, on the docstrings that are not held out; the matrices by Muon (Jordan et al. 2024), under
which they learned much faster than under AdamW. What it has learned is kept in ``build/models``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kept_models import directory_of
from measure import say
from torch.nn import functional

from quark.demo.text import evaluation_documents, model_directory, training_documents
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.graph.float_products import float_products
from quark.torch.quantization.nn.products.fast_type import multiplied_type

STEPS, TOKENS = 1000, 1024  # tokens in each step
LENGTHS = (256, 512)  # of windows; the longer in the last LONG of the steps
LONG = 0.3
WARMUP = 0.03
ALL_CHARACTERS = 1 << 30
SHAPE: dict[str, Any] = {
    "n_embd": 256,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "activation_function": "gelu_pytorch_tanh",
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def directory() -> Path:
    """Return the directory of the model and its tokenizer; train the model on first use."""
    return directory_of("gpt2", train)


def train() -> tuple[Any, Any]:
    """Return the model, trained on the predictions of the shipped model, and the tokenizer."""
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_directory())
    teacher: Any = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    vocabulary = teacher.config.vocab_size
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **SHAPE, **ends)).train()
    head = teacher.lm_head.weight.detach() * teacher.model.norm.weight.detach()
    model.transformer.wte.weight.data.copy_(head * (0.05 / head.std()))
    text = token_windows(training_documents(ALL_CHARACTERS), tokenizer, LENGTHS[1]).flatten()
    optimizers = optimizers_of(model)
    is_narrow = multiplied_type(torch.bfloat16) is torch.bfloat16
    for step in tqdm(range(STEPS), desc="training", unit="step"):
        done = step / STEPS
        length = LENGTHS[done >= 1 - LONG]
        starts = torch.randint(len(text) - length, (TOKENS // length, 1))
        windows = text[starts + torch.arange(length)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            with torch.no_grad():
                wanted = teacher(windows).logits.float().softmax(-1)
            logits = model(windows).logits.float()
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * min(1.0, done / WARMUP, 1.0 - done)
            with float_products():
                optimizer.step()
    return model.eval(), tokenizer


def optimizers_of(model: Any) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimizers of block matrices and of other parameters, with their peak rates."""
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    muon = torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, 0.01), (adamw, 0.003)]


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    place = directory()
    model = AutoModelForCausalLM.from_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    windows = token_windows(evaluation_documents(), tokenizer, LENGTHS[1], 32)
    say(f"perplexity on text that it has not seen: {perplexity(model, windows):.2f}")


if __name__ == "__main__":
    main()
