"""Structure of every decoder architecture that Transformers can build, one line each.

    python benchmarks/architectures.py
    python benchmarks/architectures.py llama mixtral --json

Models are tiny and random, and experts have linear layers of their own. *Groups* can be rescaled
and are proved, *rejected* are outputs that cannot be, *change* is the relative change of the logits
after all groups were rescaled at random, in double precision, or single for the few models that run
in nothing else. The last column says whether the residual stream can be rotated, or why not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import markdown, say
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quark.torch.graph.discovery import discover
from quark.torch.quantization.nn.experts import split_experts

sys.path.append(str(Path(__file__).parents[1]))

from tests.models.architectures import InDouble, build, inputs, parameter_count, small_config

LARGEST = 5_000_000  # parameters; configurations of parts that keep their size are left out
COLUMNS = ("architecture", "groups", "rejected", "change", "ms", "rotation")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def make(name: str) -> torch.nn.Module | str:
    """Return a tiny model that runs, or the reason why there is none."""
    try:
        config = small_config(name)
        count = parameter_count(config)
    except Exception as error:  # any of many ways in which a configuration can be unfit
        return f"not built: {_first_line(error)}"
    if count > LARGEST:
        return f"not built: {count:.0e} parameters at least"
    reason = ""
    for dtype in (torch.float64, torch.float32):
        try:
            model = build(config, dtype)
            split_experts(model)
            model.config.use_cache = False
            with torch.no_grad(), precision(model):
                model(**inputs(model))
        except Exception as error:  # the same
            reason = f"not run: {_first_line(error)}"
        else:
            return model
    return reason


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text[:100]}"


def precision(model: torch.nn.Module) -> AbstractContextManager[object]:
    """Return a context in which a model of double precision computes in double precision only."""
    return InDouble() if next(model.parameters()).dtype is torch.float64 else nullcontext()


def measure(name: str) -> dict[str, Any]:
    """Discover the structure of an architecture and rescale every group."""
    model = make(name)
    if isinstance(model, str):
        return {"architecture": name, "rotation": model}
    given = inputs(model)
    with torch.no_grad(), precision(model):
        before = model(**given).logits
        start = time.perf_counter()
        structure = discover(model, given)
        seconds = time.perf_counter() - start
        for group in structure.groups:
            group.apply_(model, torch.rand(group.size) * 1.5 + 0.5)
        after = model(**given).logits
    return {
        "architecture": name,
        "groups": len(structure.groups),
        "rejected": len(structure.rejected),
        "change": f"{float((after - before).norm() / before.norm()):.0e}",
        "ms": round(1000 * seconds),
        "rotation": "yes" if structure.stream else f"no: {structure.obstacle}",
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    rows = []
    for name in options.names or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        say(name)
        rows.append(measure(name))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    found = [row for row in rows if "groups" in row]
    rotating = sum(row["rotation"] == "yes" for row in found)
    title = f"{len(found)} of {len(rows)} architectures built, {rotating} with rotations"
    print(markdown(title, COLUMNS, ([row.get(c) for c in COLUMNS] for row in rows)))


if __name__ == "__main__":
    main()
