"""GPTQ and AWQ on two blocks of a random Llama, beside the arithmetic that they cannot do without.

    python benchmarks/solving.py '["gptq", "awq"]' 1024 '"bfloat16"'

The limit of GPTQ is two forward passes, half of the products x xᵀ of each distinct input, one
factorization for each, and the products of the solver, O · I² for a weight of (O, I). All parts are
measured in this process, in the sizes of the model, in turns with the algorithms. Sums, factors and
products of the solver are in float32 whatever the type of the model.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from measure import alternate

WINDOWS, LENGTH, BLOCKS = 16, 512, 2
ROWS = 2048  # tokens whose products are summed at a time
ROUNDS, LARGE_ROUNDS = 2, 1  # after one to warm up; of models from LARGE on
LARGE = 2048


def model_of(hidden: int) -> Any:
    """Return a model with two decoder blocks in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=BLOCKS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
    )
    return LlamaForCausalLM(config).eval()


def solving(algorithms: Sequence[str], hidden: int, dtype: str = "float32") -> list[dict[str, Any]]:
    """Return CPU seconds of algorithms, of forward passes and of the limit of GPTQ."""
    torch.set_num_threads(1)
    logging.getLogger("quark").setLevel(logging.ERROR)
    model = model_of(hidden).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(1000, (4, LENGTH), generator=generator) for _ in range(WINDOWS // 4)]

    @torch.no_grad()
    def forward() -> None:
        for batch in data:
            model(batch)

    parts = {"forward": forward, "gram": lambda: sums(model), "factor": lambda: factors(model)}
    parts |= {"solver": lambda: products(model)}
    parts |= {name: partial(quantize, model, data, name) for name in algorithms}
    seconds = alternate(parts, LARGE_ROUNDS if hidden >= LARGE else ROUNDS)
    rest = seconds["gram"] / 2 + seconds["factor"] + seconds["solver"]
    limit = 2 * seconds["forward"] + rest
    return [
        {
            "algorithm": name,
            "hidden": hidden,
            "dtype": dtype,
            "forward_s": seconds["forward"],
            "limit_s": limit,
            "seconds": seconds[name],
            "forwards": seconds[name] / seconds["forward"],
            "ratio": seconds[name] / limit,
        }
        for name in algorithms
    ]


def quantize(model: Any, data: list[torch.Tensor], algorithm: str) -> None:
    """Quantize a copy of the model to int4 in groups of 128."""
    from quark.torch import LLMTemplate, ModelQuantizer

    config = LLMTemplate.get("llama").get_config("int4_wo_128", algorithm=algorithm)
    ModelQuantizer(config).quantize_model(copy.deepcopy(model), data)


def widths(model: Any) -> list[int]:
    """Return the number of channels of each distinct input of a block."""
    config = model.config
    heads = config.num_attention_heads * config.head_dim
    return [config.hidden_size, heads, config.hidden_size, config.intermediate_size]


def sums(model: Any) -> None:
    """Sum x xᵀ over all tokens, for each distinct input."""
    for width in widths(model) * BLOCKS:
        x, total = torch.zeros(ROWS, width), torch.zeros(width, width)
        for _ in range(WINDOWS * LENGTH // ROWS):
            total.addmm_(x.T, x)


def factors(model: Any) -> None:
    """Compute the factor of an inverse for each distinct input."""
    for width in widths(model) * BLOCKS:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(torch.eye(width)))
        torch.linalg.cholesky(inverse, upper=True)


def products(model: Any) -> None:
    """Compute O · I² products and sums for each weight: those of I / 2 columns on average."""
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            outputs, inputs = layer.weight.shape
            torch.zeros(outputs, inputs // 2) @ torch.zeros(inputs // 2, inputs)


if __name__ == "__main__":
    print(json.dumps(solving(*map(json.loads, sys.argv[1:]))))
