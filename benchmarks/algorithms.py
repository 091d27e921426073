"""Accuracy that algorithms recover, and their time and memory.

    python benchmarks/algorithms.py                   # the model in the package, and its twin
    python benchmarks/algorithms.py --rows int4_wo_128,mxfp4 --json
    python benchmarks/algorithms.py --models second   # a GPT-2, trained on first use: second.py
    python benchmarks/algorithms.py --model MODEL --text FILE
    python benchmarks/algorithms.py --peer amd-quark --peer auto-round --models plain

The twin computes the same, but a few channels after each norm are many times larger, and the
weights that read them as much smaller: what outliers do to large models. Seconds are in passes: how
long the float model takes for the calibration data once. ``--peer`` adds the algorithms of other
software; bits are those of a scheme in our checkpoints.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import accuracy
import peers
import rivals
import second
import torch
from measure import Meter, cpu_seconds, in_fresh_process, machine, markdown, say
from scores import divergence

from quark.demo.text import training_documents
from quark.torch import ModelQuantizer
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.export.checkpoint.writer import collect, make_format
from quark.torch.export.checkpoint_contents import summarize
from quark.torch.graph.discovery import discover
from quark.torch.numerics.dtypes import type_name
from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.config import presets
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.export import JsonExporterConfig

KINDS = ("plain", "twin", "second")  # of models
CALIBRATION_WINDOWS = 64
OUTLIERS = 4  # channels after each norm
STRENGTH = 24.0
COLUMNS = {
    "model": "model",
    "scheme": "scheme",
    "bits": "bits/weight",
    "software": "software",
    "algorithm": "algorithm",
    "perplexity": "perplexity",
    "increase": "increase",
    "kl": "KL, millinats",
    "passes": "passes",
    "added": "added, MiB",
}
_W8A8 = "w_int8_per_channel_a_int8_per_tensor_sym"
_W4A4 = "w_int4_per_channel_a_int4_per_token"
_AUTO = {"name": "autosmoothquant"}
_R1R2: dict[str, Any] = {"name": "rotation", "r2": True}
_R1R2R4: dict[str, Any] = {**_R1R2, "r4": True}
_LEARNED: dict[str, Any] = {**_R1R2, "trainable": True}
_R3: dict[str, Any] = {"name": "rotation", "r1": False, "r3": True}
_GPTQ = {"name": "gptq"}
_QRONOS = {"name": "qronos"}
_YAQA = {"name": "yaqa"}
_AUTOROUND = {"name": "autoround"}
_SVDQUANT = {"name": "svdquant", "min_layer_size": 64}
# Schemes without a preset -> the preset they are like, and the format instead of its own.
OTHERS = {"int3_wo_128": ("int4_wo_128", Dtype.int3), _W4A4: ("ptpc_int8", Dtype.int4)}
# Keys and values alone, quantized so, before or after rotary embedding.
CACHES = {
    "int4 cache per token": QuantizationSpec(
        dtype="int4", qscheme="per_channel", ch_axis=1, is_dynamic=True
    ),
    "int8 cache": presets.kv_cache_scheme("int8_per_tensor_static"),
    "fp8 cache": presets.kv_cache_scheme("fp8"),
}
_BEFORE, _AFTER = " before rotary embedding", " after rotary embedding"
# Scheme -> what to try, by a name for the table.
ROWS: dict[str, dict[str, list[dict[str, Any]]]] = {
    _W8A8: {
        "": [],
        "smooth, alpha 0.8": [{"name": "smooth", "alpha": 0.8}],
        "smooth, alpha 1": [{"name": "smooth", "alpha": 1}],
        "autosmoothquant": [_AUTO],
    },
    "int4_wo_128": {
        "": [],
        "awq": [{"name": "awq"}],
        "gptq": [_GPTQ],
        "gptaq": [{"name": "gptaq"}],
        "qronos": [_QRONOS],
        "yaqa": [_YAQA],
        "autoround": [_AUTOROUND],
        "rotation R1 R2, gptq": [_R1R2, _GPTQ],
        "wanda 2:4, gptq": [{"name": "wanda"}, _GPTQ],
        "sparsegpt 2:4": [{"name": "sparsegpt"}],
        "sparsegpt 2:4, gptq": [{"name": "sparsegpt"}, _GPTQ],
    },
    "int4_wo_32": {"": [], "awq": [{"name": "awq"}], "gptq": [_GPTQ]},
    "uint4_wo_128": {"": [], "awq": [{"name": "awq"}], "gptq": [_GPTQ], "yaqa": [_YAQA]},
    "int3_wo_128": {
        "": [],
        "awq": [{"name": "awq"}],
        "gptq": [_GPTQ],
        "qronos": [_QRONOS],
        "yaqa": [_YAQA],
        "autoround": [_AUTOROUND],
    },
    "w_int2_per_group_asym": {
        "": [],
        "gptq": [_GPTQ],
        "qronos": [_QRONOS],
        "yaqa": [_YAQA],
        "autoround": [_AUTOROUND],
    },
    "mxfp4": {
        "": [],
        "autoround": [_AUTOROUND],
        "rotation R1 R2": [_R1R2],
        "rotation R1 R2 R4": [_R1R2R4],
        "learned R1 R2": [_LEARNED],
        "gptq": [_GPTQ],
        "rotation R1 R2, gptq": [_R1R2, _GPTQ],
        "rotation R1 R2 R4, gptq": [_R1R2R4, _GPTQ],
        "rotation R1 R2 R4, yaqa": [_R1R2R4, _YAQA],
        "learned R1 R2, gptq": [_LEARNED, _GPTQ],
        "svdquant": [_SVDQUANT],
        "svdquant, gptq": [_SVDQUANT, _GPTQ],
    },
    "nvfp4": {
        "": [],
        "gptq": [_GPTQ],
        "yaqa": [_YAQA],
        "awq, yaqa": [{"name": "awq"}, _YAQA],
        "rotation R1 R2, gptq": [_R1R2, _GPTQ],
        "rotation R1 R2, yaqa": [_R1R2, _YAQA],
    },
    _W4A4: {
        "": [],
        "rotation R1 R2": [_R1R2],
        "rotation R1 R2 R4": [_R1R2R4],
        "learned R1 R2": [_LEARNED],
        "rotation R1 R2 R4, gptq": [_R1R2R4, _GPTQ],
        "rotation R1 R2 R4, yaqa": [_R1R2R4, _YAQA],
        "svdquant": [_SVDQUANT],
        "svdquant, gptq": [_SVDQUANT, _GPTQ],
    },
    **{f"{cache}{_BEFORE}": {"": []} for cache in CACHES},
    **{f"{cache}{_AFTER}": {"": [], "rotation R3": [_R3]} for cache in CACHES},
}
# What is tried on the second model.
SECOND = {
    _W8A8: ("", "smooth, alpha 0.8", "autosmoothquant"),
    "int4_wo_128": ("", "awq", "gptq", "qronos", "yaqa"),
    "int3_wo_128": ("", "gptq", "yaqa"),
    "mxfp4": ("", "rotation R1 R2 R4", "rotation R1 R2 R4, yaqa"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory of another model")
    parser.add_argument("--text", help="file or dataset to evaluate on, instead of docstrings")
    parser.add_argument(
        "--windows", type=int, default=64, help="number of evaluation windows (default 64)"
    )
    parser.add_argument("--rows", help="schemes, separated by commas (default: all)")
    parser.add_argument("--models", default="plain,twin", help="models: any of plain,twin,second")
    parser.add_argument(
        "--quick", action="store_true", help="skip algorithms with gradient descent"
    )
    parser.add_argument(
        "--peer",
        action="append",
        choices=rivals.PEERS,
        default=[],
        help="also measure this software; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def model_config(scheme: str) -> Config:
    """Return the configuration of a model, including schemes without a preset."""
    cache = scheme.removesuffix(_BEFORE).removesuffix(_AFTER)
    if cache in CACHES:
        cached = QuantizationConfig(output_tensors=CACHES[cache])
        return Config(
            kv_cache_quant_config={"*k_proj": cached, "*v_proj": cached},
            kv_cache_post_rope=scheme.endswith(_AFTER),
            kv_cache_group=["*k_proj"],
        )
    like, dtype = OTHERS.get(scheme, (scheme, None))
    layer = presets.scheme(like)
    for _, spec in layer.specs() if dtype else ():
        spec.dtype = dtype
    return Config(global_quant_config=layer, exclude=["lm_head"])


@torch.no_grad()
def plant_outliers(model: Any, batch: torch.Tensor) -> Any:
    """Make a few channels after each norm larger and the weights that read them smaller."""
    generator = torch.Generator().manual_seed(0)
    for group in discover(model, batch[:1, :32]).groups:
        if group.kind == "norm":
            factors = torch.ones(group.size)
            factors[torch.randperm(group.size, generator=generator)[:OUTLIERS]] = 1 / STRENGTH
            group.apply_(model, factors)
    return model


def plain_pass(model: Any, batches: list[torch.Tensor]) -> float:
    """Return the CPU seconds of the float model for all calibration data."""
    start = cpu_seconds()
    with torch.inference_mode():
        for batch in batches:
            model(batch)
    return cpu_seconds() - start


def measure(
    model: Any, scheme: str, algorithms: list[dict[str, Any]], data: list[torch.Tensor]
) -> tuple[Any, Meter]:
    """Quantize a copy of a model; return it with its time and memory."""
    options = [algo_config_from_dict(given) for given in algorithms]
    config = replace(model_config(scheme), algo_config=options or None)
    quantized = copy.deepcopy(model)
    with Meter() as meter:
        quantized = ModelQuantizer(config).quantize_model(quantized, data)
        ModelQuantizer.freeze(quantized)
    return quantized, meter


def learns(algorithms: list[dict[str, Any]]) -> bool:
    """Return whether one of some algorithms takes many steps of gradient descent."""
    return any(a.get("trainable") or a["name"] == "autoround" for a in algorithms)


def bits_per_weight(quantized: Any, scheme: str) -> float | None:
    """Return the bits per weight in the checkpoint of a quantized model."""
    stored = collect(quantized, make_format(quantized, None, JsonExporterConfig(), "quark"))
    return summarize(stored, model_config(scheme), type_name(quantized.dtype)).bits_per_weight


class Bench:
    """A float model, its quantized layers, its data, and the measurement of a row."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        self.options, self.kind = options, kind
        self.pythons = {peer: peers.environment(peer) for peer in options.peer}
        directory = second.directory() if kind == "second" else options.model
        material = accuracy.Material(directory, options.text, options.windows)
        self.original = material.model.float()
        self.tokenizer, self.windows = material.tokenizer, material.evaluation
        documents, length = training_documents(400_000), self.windows.shape[1]
        self.calibration = token_windows(documents, self.tokenizer, length, CALIBRATION_WINDOWS)
        self.data = list(self.calibration.split(8))
        self.base = perplexity(self.original, self.windows)
        self.once = plain_pass(self.original, self.data)
        self.model = self.original
        if kind == "twin":
            self.model = plant_outliers(copy.deepcopy(self.original), self.calibration)
        self.tried: dict[str, Iterable[str]] = SECOND if kind == "second" else ROWS

    def rows(self, wanted: Collection[str]) -> list[dict[str, Any]]:
        """Return the rows of these schemes, as far as they are tried on this model."""
        with tempfile.TemporaryDirectory() as folder:
            windows = {"calibration": self.calibration, "evaluation": self.windows}
            rivals.share(Path(folder), self.model, self.tokenizer, **windows)
            return [
                {"model": self.kind, **row}
                for scheme in self.tried
                if scheme in wanted
                for row in self.scheme(scheme, folder)
            ]

    def scheme(self, scheme: str, folder: str) -> list[dict[str, Any]]:
        """Return the rows of a scheme: ours, then those of peers, who read the shared folder."""
        rows, bits = [], None
        for label in self.tried[scheme]:
            algorithms = ROWS[scheme][label]
            if self.options.quick and learns(algorithms):
                continue
            say(f"{self.kind}: {scheme} {label}")
            quantized, meter = measure(self.model, scheme, algorithms, self.data)
            bits = bits or bits_per_weight(quantized, scheme)
            row = {
                "perplexity": perplexity(quantized, self.windows),
                "kl": 1000 * divergence(self.original, quantized, self.windows),
                "passes": meter.cpu / self.once,
                "added": meter.added,
            }
            rows.append({"software": "quark", "algorithm": label or None, **row})
        for peer, python in self.pythons.items():
            for label, algorithms in rivals.PEERS[peer][1].get(scheme, {}).items():
                if self.options.quick and learns(algorithms):
                    continue
                say(f"{self.kind}: {scheme} {peer} {label}")
                given = peer, scheme, label, folder
                try:
                    row = in_fresh_process("rivals.py", *given, python=python)
                except RuntimeError as error:
                    say(f"left out: {error}")
                    continue
                scores = row["texts"]["evaluation"]
                row |= {"perplexity": scores["perplexity"], "kl": mean(scores["kl"])}
                rows.append({"software": peer, "algorithm": label or None, **row})
        extra = {"scheme": scheme, "bits": bits}
        return [{**extra, "increase": row["perplexity"] - self.base, **row} for row in rows]


def main() -> None:
    options = arguments()
    logging.basicConfig()
    torch.set_num_threads(1)
    wanted = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := set(wanted) - set(ROWS):
        raise SystemExit(f"no rows for {', '.join(sorted(unknown))}; there are: {', '.join(ROWS)}")
    kinds = options.models.split(",")
    if not set(kinds) <= set(KINDS):
        raise SystemExit(f"--models takes {', '.join(KINDS)}, with commas between, got {kinds}")
    benches = [Bench(options, kind) for kind in kinds]
    rows = [row for bench in benches for row in bench.rows(wanted)]
    if options.json:
        base = {bench.kind: bench.base for bench in benches}
        print(json.dumps({"machine": machine(), "float": base, "rows": rows}, indent=2))
        return
    print(machine(), end="\n\n")
    for bench in benches:
        print(f"{bench.kind}: {bench.base:.3f} in float.", end=" ")
        print(f"A plain pass of the calibration data: {bench.once:.1f} CPU s.", end="\n\n")
    title = f"Perplexity on {options.windows} windows of {benches[0].windows.shape[1]} tokens"
    print(markdown(title, [*COLUMNS.values()], [[row[c] for c in COLUMNS] for row in rows]))


if __name__ == "__main__":
    main()
