r"""Quantize weights and inputs to MXFP4, after rotations, with GPTQ.

    python examples/rotated_mxfp4.py --output_dir OUT
    python examples/rotated_mxfp4.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, the model of this package. OUT
is a checkpoint for Transformers and vLLM.
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

    # Rotations spread outliers over all channels, where scales that are powers of two lose less.
    # They merge into weights. For nvfp4, whose scales are finer, take "awq" in their place.
    template = LLMTemplate.get(model.config.model_type)
    config = template.get_config(scheme="mxfp4", algorithm=["rotation", "gptq"])
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, windows[HELD_OUT:].split(1)))
    print(f"perplexity after: {perplexity(model, windows[:HELD_OUT]):.3f}")
    export_safetensors(model, options.output_dir, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
