"""``quark search``: the format of each layer with the least loss at a given size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from quark.cli import accelerators, console
from quark.cli.collect import (
    collect,
    describe_collection,
    find_float_model,
    load_float_model,
    read_optional_statistics,
    read_windows,
)
from quark.cli.exclusions import check_exclusions
from quark.cli.memory_check import check_measurement
from quark.cli.options import ManyValues, add_verb, counted_windows, verb
from quark.cli.outputs import check_file, check_offload_directory
from quark.cli.predicted_text import check_predicts_text, check_reads_text
from quark.cli.quantize.config import check_algorithms, layer_scheme
from quark.cli.quantize.request import split_names
from quark.cli.search.budget import (
    check_flags,
    check_reach,
    check_size,
    choose,
    measure_seconds,
)
from quark.cli.search.flags import SearchRequest
from quark.cli.search.measurement import Measure, curve_of, measure_result
from quark.cli.search.tables import print_result

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.quantization.config.algo import AlgoConfig
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.layer import QuantizationConfig
    from quark.torch.search.loss_curve import LossCurve
    from quark.torch.search.mixtures import Mixture

FORMATS = ("int2_wo_64", "int3_wo_128", "int4_wo_128", "int4_wo_32", "int8_wo")
PROBES = 1  # pieces of text on which sensitivities are measured

HELP = f"""
Choose the format of each layer with the least loss at a given size.

The sensitivity of the predictions to each layer is measured once ([cyan]quark
collect[/cyan]). The loss of every format is then computed without running the model,
and the best mixture is computed for every size at once. The result is a file
for [cyan]quark quantize --config[/cyan].

[bold]Examples[/bold]

    [cyan]quark search --model_dir llama --target_bits 3.5 --output mixed.json \\
      --quant_algo qronos[/cyan]

    [cyan]quark quantize --model_dir llama --output_dir llama-mixed --config mixed.json[/cyan]

  The smallest mixture that raises the perplexity by at most 2 %, from existing statistics:

    [cyan]quark search --model_dir llama --statistics llama-statistics \\
      --max_perplexity_increase 2 --output mixed.json --picture mixed.svg[/cyan]

Default formats: [cyan]{", ".join(FORMATS)}[/cyan].
"""


class _Command(ManyValues):
    many = ("exclude_layers",)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "search", verb(SearchRequest, _search_formats), HELP, _Command)


def _search_formats(request: SearchRequest) -> None:
    from quark.torch.evaluation.predictions import Reference
    from quark.torch.graph.residency import residency_of
    from quark.torch.pipeline.activation_store import ActivationStore
    from quark.torch.pipeline.memory_limit import results_limit
    from quark.torch.quantization.config.algo import SolverConfig
    from quark.torch.search.mixtures import Mixture, measure_costs, mixed_config
    from quark.torch.search.sizes import size_outside

    _check(request)
    formats = _parse_formats(request)
    algorithms = _parse_algorithms(request, formats)
    check_size(request, formats)
    statistics = read_optional_statistics(request.statistics, request.check_digests)
    source = find_float_model(request)
    _check_outputs(request, source)
    _check_memory(request, source)
    windows = read_windows(request, source) if statistics is None else None
    evaluation = None if request.skip_evaluation else _read_evaluation_windows(request, source)
    model = load_float_model(request, source)
    _check_exclusions(request, model)
    device = accelerators.pick_device(request.device)
    check_reach(request, model, formats)
    seconds = measure_seconds(request, model, formats, device)
    if windows is not None:
        statistics = collect(model, windows, request, PROBES)
    assert statistics is not None
    with console.stage("computing losses of formats"):
        excluded = request.exclude_layers or ()
        solved = any(isinstance(options, SolverConfig) for options in algorithms)
        units = measure_costs(model, statistics, formats, excluded, request.together, solved)
        mixture = Mixture(units, per_token=request.target_read is not None)
        outside = size_outside(model, statistics, units)
    configure = partial(mixed_config, model, formats=formats)
    limit = results_limit(residency_of(model) is not None, request.max_memory, device)
    with ActivationStore(limit // 2) as store, ActivationStore(limit // 2) as other_store:
        measure = Measure(model, statistics, evaluation, configure, Reference(store))
        chosen = choose(request, mixture, outside, measure, seconds)
        curve = curve_of(mixture, chosen, measure, other_store, solved)
        config = replace(measure.configure(chosen), algo_config=algorithms)
        _write_files(request, config, mixture, chosen, curve)
        result = measure_result(mixture, chosen, outside, measure, curve, seconds)
    if request.as_json:
        console.as_json({"output": str(request.output), "layers": chosen, **asdict(result)})
        return
    print_result(mixture, chosen, result)
    _print_next_step(request)


def _check(request: SearchRequest) -> None:
    """Check flags against each other, and the files to write.

    Raises:
        typer.BadParameter: Flags contradict each other, or a file cannot be written.
    """
    check_flags(request)
    for name in ("dataset", "num_calib_data"):
        if request.statistics is not None and name in request.given:
            raise console.wrong(
                f"--{name}", "--statistics contains this already. Leave one of the two out."
            )
    if request.offload_dir is not None:
        check_offload_directory(request.offload_dir)
    for flag, path in {"--output": request.output, "--picture": request.picture}.items():
        if path is not None:
            check_file(flag, path, request.overwrite)
    if request.picture is not None and request.picture.resolve() == request.output.resolve():
        raise console.wrong(
            "--picture", f"{request.picture} is the file of --output too. Give another name."
        )


def _check_exclusions(request: SearchRequest, model: nn.Module) -> None:
    from quark.torch.quantization.nn.experts import temporarily_split_experts
    from quark.torch.search.sizes import candidate_layers

    with temporarily_split_experts(model):
        check_exclusions(request.exclude_layers or (), model, list(candidate_layers(model)))


def _check_outputs(request: SearchRequest, source: Path) -> None:
    """Check that text runs the model, and that it can be evaluated if it will be.

    Raises:
        typer.BadParameter: It reads something else, or predicts no next token.
    """
    check_reads_text(source, "--model_dir", request.trust_remote_code)
    if not request.skip_evaluation:
        remedy = "Give --skip_evaluation."
        check_predicts_text(source, "--model_dir", remedy, request.trust_remote_code)


def _check_memory(request: SearchRequest, source: Path) -> None:
    """Check that there is room for statistics, if they are not given, and for the evaluation."""
    from quark.torch.evaluation.perplexity import BATCH_SIZE
    from quark.torch.evaluation.predictions import positions_of
    from quark.torch.search.loss_curve import POSITIONS, WINDOWS

    run = describe_collection(request, source, PROBES)
    if request.statistics is not None:
        run = replace(run, collected=0)
    windows = 0 if request.skip_evaluation else counted_windows(request.num_eval_data)
    kept = windows * positions_of(run.length)
    kept += WINDOWS * positions_of(run.length, POSITIONS) if windows > WINDOWS else 0
    run = replace(run, evaluated=windows, evaluated_batch=BATCH_SIZE, kept_predictions=kept)
    check_measurement(run)


def _parse_formats(request: SearchRequest) -> dict[str, QuantizationConfig]:
    from quark.torch.search.mixtures import check_formats

    names = list(FORMATS) if request.formats is None else split_names([request.formats])
    if not names:
        raise console.wrong("--formats", "give one or more schemes.")
    formats = {name: layer_scheme("--formats", name) for name in names}
    try:
        check_formats(formats)
    except ValueError as error:
        raise console.wrong("--formats", str(error)) from None
    return formats


def _parse_algorithms(
    request: SearchRequest, formats: Mapping[str, QuantizationConfig]
) -> list[AlgoConfig]:
    from quark.torch.quantization.config.algo_lookup import make_algo_configs
    from quark.torch.quantization.config.config import Config

    try:
        configs = make_algo_configs(split_names(request.quant_algo or []), {})
    except ValueError as error:
        raise console.wrong("--quant_algo", str(error)) from None
    check_algorithms(Config(layer_quant_config=dict(formats), algo_config=configs))
    return configs


def _read_evaluation_windows(request: SearchRequest, source: Path) -> torch.Tensor:
    held_out = replace(request, dataset=request.eval_data, num_calib_data=request.num_eval_data)
    return read_windows(held_out, source, held_out=True)


def _write_files(
    request: SearchRequest,
    config: Config,
    mixture: Mixture,
    chosen: Mapping[str, str],
    curve: LossCurve,
) -> None:
    from quark.torch.files import write_json, write_text
    from quark.torch.search.chart import render_chart

    picture = None
    if request.picture is not None:
        marked = {**mixture.uniform(), "chosen": mixture.cost(chosen)}
        corrected = {name: (bits, curve(loss)) for name, (bits, loss) in marked.items()}
        points = [(bits, curve(loss)) for bits, loss in mixture.points()]
        title, size = "predicted loss, nats per token", "bits per weight"
        size += " that a token reads" if request.target_read is not None else ""
        picture = render_chart(points, corrected, title, size)
    write_json(request.output, config.to_dict(everything=True))
    if request.picture is not None and picture is not None:
        write_text(request.picture, picture)


def _print_next_step(request: SearchRequest) -> None:
    console.say(f"Written to {escape(str(request.output))}. Next step:\n")
    model, output = escape(str(request.model_dir)), escape(str(request.output))
    console.show_code(f"quark quantize --model_dir {model} --output_dir OUTPUT --config {output}")
    console.out.print()
