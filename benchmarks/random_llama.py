"""A Llama with random weights, built in memory: the model whose quantization is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = {"full": 32000, "quick": 1000}
SHAPES: dict[str, dict[str, int]] = {
    "full": {  # 254 million parameters
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "quick": {  # 4 million parameters
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def build(size: str) -> Any:
    """Return the model in float32, in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY[size], **SHAPES[size])).eval()


def write(directory: str, blocks: int, shape: dict[str, int]) -> int:
    """Write a model of equal blocks in bfloat16; return the bytes of its files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=blocks, dtype="bfloat16", **shape)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights that are quantized: those of all linear layers but the output head."""
    layers = (m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    return [layer.weight.detach() for layer in layers]


def batches(size: str, count: int, length: int = 256) -> list[torch.Tensor]:
    """Return random token identifiers, each (1, length)."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY[size], (1, length), generator=generator) for _ in range(count)]
