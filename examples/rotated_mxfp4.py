r"""Quantize weights and inputs to MXFP4 by its recipe: SmoothQuant, rotations of inputs, YAQA.

    python examples/rotated_mxfp4.py --output_dir OUT
    python examples/rotated_mxfp4.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, the model of this package. OUT
is a checkpoint for Transformers, where this package is imported: it adds the rotations.
"""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import calibration_documents, model_directory
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.evaluation.perplexity import perplexity, token_windows

TOKENS, HELD_OUT = 512, 4  # tokens of a window, windows that measure the loss


def main() -> None:
    """Quantize, measure, and write."""
    parser = argparse.ArgumentParser(description="Quantize to rotated MXFP4.")
    parser.add_argument("--model_dir", default=model_directory())
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    count = options.samples + HELD_OUT
    windows = token_windows(calibration_documents(), tokenizer, TOKENS, count)
    print(f"perplexity before: {perplexity(model, windows[:HELD_OUT]):.3f}")

    # SmoothQuant makes outliers of inputs smaller. Then each block of 32 inputs, which share a
    # scale, is rotated in the forward pass, so that what is left of outliers stays in its block.
    # In nvfp4, whose blocks of 16 have finer scales, rotations lose: take get_recipe("nvfp4").
    config = LLMTemplate.get(model.config.model_type).get_recipe("mxfp4_rotated")
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, windows[HELD_OUT:].split(1)))
    print(f"perplexity after: {perplexity(model, windows[:HELD_OUT]):.3f}")
    export_safetensors(model, options.output_dir, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
