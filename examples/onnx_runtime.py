r"""Quantize a language model to int8, write it as ONNX, and run it in ONNX Runtime.

    python examples/onnx_runtime.py --output_dir OUT
    python examples/onnx_runtime.py --model_dir MODEL --output_dir OUT

MODEL is a directory, or a name on the Hugging Face Hub; without it, the model of this package. OUT
gets `quark_model.onnx`. Needs the extra `onnx`, and onnxruntime.
"""

import argparse

import onnxruntime
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import calibration_documents, model_directory
from quark.torch import LLMTemplate, ModelQuantizer, export_onnx
from quark.torch.evaluation.perplexity import token_windows

TOKENS = 64  # of a window


def main() -> None:
    """Quantize, write, and compare the predictions of PyTorch and ONNX Runtime."""
    parser = argparse.ArgumentParser(description="Quantize a language model for ONNX Runtime.")
    parser.add_argument("--model_dir", default=model_directory())
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--samples", type=int, default=128, help="windows of calibration text")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    windows = token_windows(calibration_documents(), tokenizer, TOKENS, options.samples + 1)

    config = LLMTemplate.get(model.config.model_type).get_config(scheme="int8")
    quantizer = ModelQuantizer(config)
    model = quantizer.freeze(quantizer.quantize_model(model, windows[1:].split(1)))
    inputs = {"input_ids": windows[:1], "attention_mask": torch.ones_like(windows[:1])}
    export_onnx(model, options.output_dir, inputs)

    # docs/onnx.md explains this setting: without it, products of some processors saturate.
    settings = onnxruntime.SessionOptions()
    settings.add_session_config_entry("session.x64quantprecision", "1")
    file = f"{options.output_dir}/quark_model.onnx"
    session = onnxruntime.InferenceSession(file, settings)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    (logits,) = session.run(None, arrays)
    with torch.no_grad():
        expected = model(**inputs).logits
    agreement = (torch.from_numpy(logits).argmax(-1) == expected.argmax(-1)).double().mean()
    print(f"same most probable token: {float(agreement):.3f}")


if __name__ == "__main__":
    main()
