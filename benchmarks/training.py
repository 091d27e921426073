"""Training of a quantized model beside rounding it: the model that comes with the package.

    python benchmarks/training.py                        # about half an hour on one core
    python benchmarks/training.py --schemes mxfp4 --ways rounded,distilled --steps 50
    python benchmarks/training.py --json

Ways: rounded to the nearest; gptq; trained on the text, by its labels; distilled, which trains on
the same text by the predictions of the float model; refined, which does so from the weights of gptq
and under its scales; finished, which trains scales and norms after gptq. The text is docstrings,
others than those of the evaluation. Figures have standard errors over the windows of the
evaluation. The last column is processor time.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
from typing import Any

import torch
from accuracy import Material
from measure import Meter, machine, markdown, say

from quark.demo.text import training_documents
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.distillation import distill
from quark.torch.evaluation.perplexity import token_windows
from quark.torch.quantization.config.config import Config, GPTQConfig
from quark.torch.training import distillation_loss, unfreeze

SCHEMES = ("int4_wo_128", "mxfp4")
WAYS = ("rounded", "gptq", "trained", "distilled", "refined", "finished")
FINISH = 192  # sequences of the finish
LENGTH = 256  # tokens of a sequence of training
BATCH = 4
_SOLVED = ("gptq", "refined", "finished")  # ways that begin with GPTQ
TEXT = 4_000_000  # characters of training text
COLUMNS = {
    "scheme": "scheme",
    "way": "way",
    "perplexity": "perplexity",
    "perplexity_error": "±",
    "kl": "KL, millinats",
    "kl_error": "±",
    "seconds": "CPU s",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="separated by commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    parser.add_argument("--steps", type=int, default=100, help="steps of training (default 100)")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate (default 2e-4)")
    parser.add_argument("--windows", type=int, default=16, help="evaluation windows (default 16)")
    parser.add_argument("--threads", type=int, default=1, help="number of threads (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def train(model: Any, teacher: Any, windows: torch.Tensor, way: str, options: Any) -> None:
    """Train a quantized model for some steps, with a rate that falls to zero by a cosine."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    for step in range(options.steps):
        ids = windows[[(step * BATCH + i) % len(windows) for i in range(BATCH)]]
        if way in ("distilled", "refined"):
            with torch.no_grad():
                target = teacher(ids).logits
            loss = distillation_loss(model(ids).logits, target)
        else:
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            say(f"  step {step}: {loss.item():.4f}")
    model.eval()


@torch.inference_mode()
def score(model: Any, teacher: Any, windows: torch.Tensor) -> dict[str, float]:
    """Perplexity and divergence from the float model, with standard errors over the windows."""
    losses, divergences = [], []
    for window in windows.split(1):
        own, expected = (
            m(window).logits[0, :-1].double().log_softmax(-1) for m in (model, teacher)
        )
        losses.append(-own.gather(1, window[0, 1:, None]).mean())
        divergences.append((expected.exp() * (expected - own)).sum(-1).mean())
    loss, kl = torch.stack(losses), torch.stack(divergences)
    root = math.sqrt(len(windows))
    perplexity = float(loss.mean().exp())
    return {
        "perplexity": perplexity,
        "perplexity_error": perplexity * float(loss.std()) / root,
        "kl": 1e3 * float(kl.mean()),
        "kl_error": 1e3 * float(kl.std()) / root,
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    logging.getLogger("quark").addHandler(logging.NullHandler())
    material = Material(None, None, options.windows)
    teacher = material.model.float()
    text = token_windows(training_documents(TEXT), material.tokenizer, LENGTH)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(0))
    template = LLMTemplate.get(teacher.config.model_type)
    rows = [{"scheme": "float", "way": None, **score(teacher, teacher, material.evaluation)}]
    for scheme in options.schemes.split(","):
        for way in options.ways.split(","):
            say(f"{scheme}, {way}")
            config: Config = template.get_config(scheme=scheme)
            config.algo_config = [GPTQConfig()] if way in _SOLVED else None
            model = copy.deepcopy(teacher)
            with Meter() as meter:
                ModelQuantizer(config).quantize_model(model, material.calibration)
                if way == "refined":
                    unfreeze(model)
                if way in ("trained", "distilled", "refined"):
                    train(model, teacher, text[order], way, options)
                ModelQuantizer.freeze(model)
                if way == "finished":
                    distill(model, teacher, text[order][:FINISH].split(BATCH))
            figures = score(model, teacher, material.evaluation)
            rows.append({"scheme": scheme, "way": way, **figures, "seconds": meter.cpu})
            say(f"  {figures}")
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    title = f"{options.steps} steps of {BATCH} · {LENGTH} tokens, rate {options.rate}"
    table = [[row.get(key) for key in COLUMNS] for row in rows]
    print(machine() + "\n")
    print(markdown(title, list(COLUMNS.values()), table))


if __name__ == "__main__":
    main()
