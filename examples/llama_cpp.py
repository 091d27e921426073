r"""Quantize a language model to 4 bits, and write one GGUF file.

    python examples/llama_cpp.py --output_dir OUT
    python examples/llama_cpp.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, the model of this package. OUT
gets a `.gguf` file, named after the architecture. Needs the extra `gguf`.
"""

import argparse
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import calibration_documents, model_directory
from quark.torch import LLMTemplate, ModelQuantizer, export_gguf
from quark.torch.evaluation.perplexity import perplexity, token_windows

TOKENS, HELD_OUT = 512, 4  # tokens of a window, windows that measure the loss


def main() -> None:
    """Quantize, measure, and write."""
    parser = argparse.ArgumentParser(description="Quantize a language model for llama.cpp.")
    parser.add_argument("--model_dir", default=model_directory())
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    count = options.samples + HELD_OUT
    windows = token_windows(calibration_documents(), tokenizer, TOKENS, count)
    print(f"perplexity before: {perplexity(model, windows[:HELD_OUT]):.3f}")

    # Blocks of 32 weights with a scale and an offset are the type Q4_1 of GGUF.
    kind = model.config.model_type
    config = LLMTemplate.get(kind).get_config(scheme="uint4_wo_32", algorithm="gptq")
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, windows[HELD_OUT:].split(1)))
    print(f"perplexity after: {perplexity(model, windows[:HELD_OUT]):.3f}")
    with TemporaryDirectory() as folder:  # a model on the Hub has its tokenizer here too
        tokenizer.save_pretrained(folder)
        export_gguf(model, options.output_dir, kind, folder)


if __name__ == "__main__":
    main()
