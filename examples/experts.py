r"""Quantize a mixture of experts: int4 experts with GPTQ, fp8 elsewhere, a router in float.

    python examples/experts.py --output_dir OUT
    python examples/experts.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, a small model with random
weights. OUT is a checkpoint for Transformers.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig

from quark.demo.text import calibration_documents, model_directory
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.evaluation.perplexity import token_windows

TOKENS = 512  # of a window


def make_model() -> PreTrainedModel:
    """Return a model of two blocks with eight experts each, for the tokenizer of this package."""
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}
    config = Qwen3MoeConfig(vocab_size=2048, num_experts_per_tok=2, **sizes, **counts)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()


def main() -> None:
    """Quantize and write."""
    parser = argparse.ArgumentParser(description="Quantize a mixture of experts.")
    parser.add_argument("--model_dir")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    options = parser.parse_args()
    path = options.model_dir
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto") if path else make_model()
    tokenizer = AutoTokenizer.from_pretrained(path or model_directory())
    windows = token_windows(calibration_documents(), tokenizer, TOKENS, options.samples)

    # The router, the output head and other parts that the template names stay in float. Experts
    # that receive few tokens are named in a warning: give more samples then.
    template = LLMTemplate.get(model.config.model_type)
    config = template.get_config(
        scheme="ptpc_fp8", layer_config={"*.experts.*": "int4_wo_32"}, algorithm="gptq"
    )
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, windows.split(1)))
    export_safetensors(model, options.output_dir, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
