r"""Train a language model with low-bit weights to predict what its float model predicts.

    python train_quantized.py --output_dir OUT --quant_scheme mxfp4 --steps 200

The model and the text are those of this package. OUT is a checkpoint in safetensors.
docs/training.md has the ``Trainer`` of Transformers instead of a loop, and trained ranges.
"""

import argparse
import copy

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import model_directory, training_documents
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.training import distillation_loss, freeze_ranges

WINDOW, HELD_OUT = 128, 16  # tokens of a window, windows that do not train


def main() -> None:
    """Quantize, train, and write."""
    parser = argparse.ArgumentParser(description="Train a language model with low-bit weights.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--quant_scheme", default="mxfp4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    teacher = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32).eval()
    windows = token_windows(training_documents(200_000), tokenizer, WINDOW)
    held_out, windows = windows[:HELD_OUT], windows[HELD_OUT:]

    config = LLMTemplate.get("llama").get_config(scheme=options.quant_scheme)
    model = ModelQuantizer(config).quantize_model(copy.deepcopy(teacher))

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(ids).logits
        return distillation_loss(model(ids).logits, target, temperature=1.0)

    with torch.no_grad():
        print(f"divergence before training: {float(loss_of(held_out)):.4f}")
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    model.train()
    for step in range(options.steps):
        if step == options.steps // 2:
            freeze_ranges(model)
        optimizer.zero_grad()
        loss_of(windows[torch.randint(len(windows), (4,))]).backward()
        optimizer.step()
    model = ModelQuantizer.freeze(model.eval())
    with torch.no_grad():
        print(f"divergence after training: {float(loss_of(held_out)):.4f}")
    export_safetensors(model, options.output_dir, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
