"""Accuracy of formats chosen layer by layer, of one format for all layers, and of recipes.

    python benchmarks/mixed.py                        # the model that comes with the package
    python benchmarks/mixed.py --targets 3.28,4.28 --kinds solved,together --json
    python benchmarks/mixed.py --formats mxfp4,mxfp6_e2m3,mxfp8 --targets 5 --algorithms gptq
    python benchmarks/mixed.py --part ranking --formats ptpc_int8,int4_wa_128,mxfp4,mxfp6_e2m3
    python benchmarks/mixed.py --part recipes --recipes w4,w3
    python benchmarks/mixed.py --model MODEL --text FILE

Statistics are collected once. Each mixture is the best of its size for them; uniform formats stand
beside it. A curve through mixtures, measured on a few windows, corrects the sum of the losses of
layers and gives the predicted loss. Mixtures and formats are rounded to the nearest, and by
algorithms that run data. Mixtures of the kind *solved* are chosen by errors of GPTQ; in *together*
layers that read a tensor share a format. The ranking is that of random mixtures by sums and by what
is measured.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accuracy
import torch
from measure import Meter, machine, markdown, say
from scores import divergence

from quark.demo.text import training_documents
from quark.torch import LLMTemplate, ModelQuantizer, collect_statistics
from quark.torch.evaluation.perplexity import perplexity, token_windows
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.config import presets
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.recipes import RECIPES
from quark.torch.search.loss_curve import curve_windows, measure_curve
from quark.torch.search.mixtures import Mixture, measure_costs, mixed_config, temporarily_quantized

CALIBRATION_WINDOWS = 64
FORMATS = "int2_wo_128,int2_wo_64,int3_wo_128,int3_wo_64,int4_wo_128,int4_wo_32,int8_wo"
ALGORITHMS = "gptq,qronos"
KINDS = ("solved", "together")
COLUMNS = ["formats", "bits/weight", "sum", "predicted", "algorithm", "perplexity", "KL, millinats"]
COLUMNS += ["s"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory of another model")
    parser.add_argument("--text", help="file or dataset to evaluate on, instead of docstrings")
    parser.add_argument(
        "--windows", type=int, default=16, help="number of evaluation windows (default 16)"
    )
    parser.add_argument("--part", choices=("mixtures", "ranking", "recipes"), default="mixtures")
    parser.add_argument("--formats", default=FORMATS, help="formats of the mixtures")
    parser.add_argument(
        "--targets", default="3.28,3.5,4.29", help="target bits per weight, separated by commas"
    )
    parser.add_argument(
        "--algorithms", default=ALGORITHMS, help="algorithms besides rounding to the nearest"
    )
    parser.add_argument(
        "--kinds", default="", help=f"further kinds of mixtures: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--random", type=int, default=30, help="number of random mixtures to rank (default 30)"
    )
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names of recipes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


class Bench:
    """The float model, its data, and the error of quantized copies."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.material = accuracy.Material(options.model, options.text, options.windows)
        self.model: Any = self.material.model.float()
        length = self.material.evaluation.shape[1]
        tokenizer = self.material.tokenizer
        windows = token_windows(training_documents(400_000), tokenizer, length, CALIBRATION_WINDOWS)
        self.data = list(windows.split(8))

    def row(
        self, name: str, config: Config, bits: float | None = None, losses: Sequence[float] = ()
    ) -> list[Any]:
        """Quantize a copy of the model and compare it with the float model.

        Args:
            name: Name of the row.
            config: Configuration of the copy.
            bits: Bits per weight, if they are known.
            losses: Sum of the losses of layers and predicted loss, if they are known.
        """
        words = ", ".join(options.name for options in config.algo_config or [])
        model = copy.deepcopy(self.model)
        with Meter() as meter:
            model = ModelQuantizer(config).quantize_model(model, self.data)
            ModelQuantizer.freeze(model)
        found = perplexity(model, self.material.evaluation)
        lost = 1000 * divergence(self.model, model, self.material.evaluation)
        say(f"{name} {words}: {found:.3f}, {lost:.1f} millinats")
        predicted = [1000 * loss for loss in losses] or [None, None]
        return [name, bits, *predicted, words or None, found, lost, meter.cpu]

    def statistics(self) -> Statistics:
        """Return statistics of the model and its calibration data."""
        with Meter() as meter:
            statistics = collect_statistics(self.model, self.data)
        say(f"statistics: {meter.cpu:.0f} CPU s")
        return statistics

    def mixture(
        self, statistics: Statistics, formats: dict[str, QuantizationConfig], kind: str = ""
    ) -> Mixture:
        """Return what mixtures of formats cost, of a kind."""
        how = {"solved": kind == "solved", "share_formats": kind == "together"}
        with Meter() as meter:
            mixture = Mixture(measure_costs(self.model, statistics, formats, (), **how))
        say(f"costs of {len(formats)} formats: {meter.cpu:.0f} CPU s")
        return mixture

    def loss(self, chosen: Mapping[str, str], formats: dict[str, QuantizationConfig]) -> float:
        """Return the divergence of a mixture on a few windows, rounded to the nearest."""
        model = copy.deepcopy(self.model)
        config = mixed_config(model, chosen, formats)
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, self.data))
        return divergence(self.model, model, curve_windows(self.material.evaluation))


def mixtures(
    bench: Bench, names: list[str], targets: list[float], algorithms: list[str], kinds: list[str]
) -> list[list[Any]]:
    """Return rows of single formats, and of the best mixtures of each kind and size."""
    formats = {name: presets.scheme(name) for name in names}
    statistics = bench.statistics()
    mixture = bench.mixture(statistics, formats)
    curve = measure_curve(mixture, partial(bench.loss, formats=formats))
    say(f"measured mixtures: {curve.points}")
    layers = [layer for unit in mixture.units for layer in unit.layers]
    chosen = [(name, mixture, dict.fromkeys(layers, name)) for name in names]
    chosen += [(f"mixed, {target:g}", mixture, mixture.choose(target)) for target in targets]
    for kind in kinds:
        other = bench.mixture(statistics, formats, kind)
        chosen += [(f"{kind}, {target:g}", other, other.choose(target)) for target in targets]
    rows = []
    for name, found, choice in chosen:
        config = mixed_config(bench.model, choice, formats)
        for algorithm in ["", *algorithms]:
            options = [algo_config_from_dict({"name": algorithm})] if algorithm else None
            given = replace(config, algo_config=options)
            bits, total = found.cost(choice)
            rows.append(bench.row(name, given, bits, (total, curve(total))))
    return rows


def ranking(bench: Bench, names: list[str], count: int) -> list[list[Any]]:
    """Return rows of mixtures of random formats in random shares, and say how they correlate."""
    formats = {name: presets.scheme(name) for name in names}
    statistics = bench.statistics()
    mixture = bench.mixture(statistics, formats)
    torch.manual_seed(0)
    rows: list[list[Any]] = []
    other = copy.deepcopy(bench.model)
    for _ in range(count):
        shares = torch.distributions.Dirichlet(torch.ones(len(names))).sample()
        choice = {
            layer: names[int(index)]
            for unit, index in zip(
                mixture.units, torch.multinomial(shares, len(mixture.units), True), strict=True
            )
            for layer in unit.layers
        }
        bits, loss = mixture.cost(choice)
        with temporarily_quantized(other, mixed_config(other, choice, formats), statistics):
            found = 1000 * divergence(bench.model, other, bench.material.evaluation)
        shown = ", ".join(f"{[*choice.values()].count(name)} {name}" for name in names)
        say(f"{shown}: {1000 * loss:.1f} predicted, {found:.1f} millinats")
        rows.append([shown, bits, 1000 * loss, None, None, None, found, None])
    ranks = torch.tensor([[row[2], row[6]] for row in rows]).argsort(0).argsort(0).float()
    say(f"rank correlation: {float(torch.corrcoef(ranks.T)[0, 1]):.3f}")
    return rows


def recipes(bench: Bench, names: list[str]) -> list[list[Any]]:
    """Return rows of recipes, each after the row of its scheme alone."""
    template = LLMTemplate.get(bench.model.config.model_type)
    configs = {name: template.get_recipe(name) for name in names}
    return [
        bench.row(name, given)
        for name, config in configs.items()
        for given in (replace(config, algo_config=None), config)
        if given.algo_config or given is not config
    ]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    bench = Bench(options)
    names = options.formats.split(",")
    if options.part == "recipes":
        rows = recipes(bench, options.recipes.split(","))
    elif options.part == "ranking":
        rows = ranking(bench, names, options.random)
    else:
        targets = [float(target) for target in options.targets.split(",")]
        algorithms, kinds = (
            [name for name in given.split(",") if name]
            for given in (options.algorithms, options.kinds)
        )
        rows = mixtures(bench, names, targets, algorithms, kinds)
    if options.json:
        found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        print(json.dumps({"machine": machine(), "rows": found}, indent=2))
        return
    windows, length = bench.material.evaluation.shape
    base = perplexity(bench.model, bench.material.evaluation)
    print(machine(), end="\n\n")
    title = f"Perplexity on {windows} windows of {length} tokens, {base:.2f} in float"
    print(markdown(title, COLUMNS, rows))


if __name__ == "__main__":
    main()
