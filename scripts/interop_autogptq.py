"""AutoGPTQ on a CPU: it writes checkpoints, and computes the log-probabilities of text.

It asks for CUDA where it quantizes. It is given the CPU in its place, and computes the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Options of its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "4 bits, groups of 128": {"bits": 4, "group_size": 128},
    "4 bits, groups of 32, columns by activation": {"bits": 4, "group_size": 32, "desc_act": True},
    "4 bits with offsets, groups of 64": {"bits": 4, "group_size": 64, "sym": False},
    "3 bits, groups of 64": {"bits": 3, "group_size": 64},
    "2 bits, groups of 32": {"bits": 2, "group_size": 32},
    "8 bits, groups of 128": {"bits": 8, "group_size": 128},
}


def write(source: Path, folder: Path, sequences: list[list[int]]) -> list[tuple[str, Path]]:
    """Quantize a model to each of ``KINDS``.

    Args:
        source: Directory of the float model.
        folder: Where to write.
        sequences: Token ids of the calibration data.
    """
    import torch
    from auto_gptq import BaseQuantizeConfig
    from auto_gptq.modeling import _base
    from auto_gptq.modeling.llama import LlamaGPTQForCausalLM
    from transformers import AutoModelForCausalLM

    _base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in sequences]
    written = []
    for kind, options in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
        model.seqlen = len(sequences[0])
        form = BaseQuantizeConfig(**{"desc_act": False, **options})
        quantizer = LlamaGPTQForCausalLM(model, False, form)
        quantizer.quantize(examples, cache_examples_on_gpu=False)
        path = folder / kind.replace(" ", "-").replace(",", "")
        quantizer.save_quantized(str(path), use_safetensors=True)
        written.append((kind, path))
    return written


def compute(task: Any) -> Any:
    """Return log-probabilities by its layers, which dequantize codes on a CPU."""
    import torch
    from auto_gptq import AutoGPTQForCausalLM
    from interop_workers import of_model

    options = {"inject_fused_attention": False, "inject_fused_mlp": False}
    model = AutoGPTQForCausalLM.from_quantized(
        str(task.path), device="cpu", torch_dtype=torch.float32, use_safetensors=True, **options
    )
    return of_model(model.model, task.prompts)
