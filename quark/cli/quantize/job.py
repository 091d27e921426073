"""The steps of ``quark quantize``: read, quantize, evaluate, write."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.markup import escape

from quark.cli import accelerators, console, lengths, models
from quark.cli.collect import read_optional_statistics
from quark.cli.coverage import measure_coverage
from quark.cli.metrics import Figures, Measures, prepare_measures, show_scores, write_metrics
from quark.cli.model_files import find_model
from quark.cli.option_words import in_json
from quark.cli.options import SEQ_LEN
from quark.cli.predicted_text import predicts_text, read_outline, reads_text
from quark.cli.process_group import rank, wait_for_all
from quark.cli.quantize import model_checks
from quark.cli.quantize.card import CardFacts
from quark.cli.quantize.config import make_config, needs_data
from quark.cli.quantize.data import (
    check_texts,
    describe,
    find_reader,
    find_tokenizer,
    kind_of_dataset,
    read_batches,
    warn_of_unread_data,
)
from quark.cli.quantize.file_job import (
    goes_through_files,
    is_known_architecture,
    quantize_files,
)
from quark.cli.quantize.finish import Finish, read_options
from quark.cli.quantize.graph_job import run_graph
from quark.cli.quantize.group_fit import fit_groups
from quark.cli.quantize.loading import load, load_params
from quark.cli.quantize.outline import describe_float_layers, why_not_kept
from quark.cli.quantize.output import check_word_order, check_writable, write
from quark.cli.quantize.plan import RunPlan, check_plan, make_plan
from quark.cli.quantize.progress import is_finished, note_output, open_journal
from quark.cli.quantize.request import Request, check_flags, check_places
from quark.cli.quantize.source_check import check_source
from quark.cli.quantize.tables import (
    Outcome,
    scheme_rows,
    show_outcome,
    show_plan,
    show_requirements,
)

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.pipeline.statistics import Statistics
    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.config import Config


def run(request: Request) -> None:
    """Quantize, evaluate and write a model.

    Raises:
        typer.BadParameter: A flag has a wrong value; raised before the model is loaded.
        ValueError: The configuration does not fit the model. Nothing is written.
    """
    check_flags(request)
    console.show_json_only(request.json)
    if request.is_graph:
        return run_graph(request)
    directory = find_model(request.model_dir, "--model_dir", request.revision)
    request = replace(request, model_dir=directory)
    if is_finished(request):
        return
    described = models.read_config(request.model_dir, "--model_dir")
    options = _read_options(request, described) if request.quantizes else None
    check_places(request)
    check_source(request, described)
    wait_for_all()  # the first process writes nothing before the others have looked at the places
    if options is not None:
        try:
            _quantize(request, described, options)
        except ValueError as error:
            error.args = (in_json(str(error), request.recipe), *error.args[1:])
            raise
    elif rank() == 0:
        _evaluate_unchanged(request, described)


class _Options(NamedTuple):
    """The options of a run. They are checked before the output directory."""

    config: Config
    devices: list[str]
    length: int  # tokens of a window


def _read_options(request: Request, described: dict[str, Any]) -> _Options:
    """Return the options of a run, given the ``config.json`` of its model.

    Raises:
        typer.BadParameter: A flag has a wrong value.
    """
    config = make_config(request, str(described.get("model_type", "")))
    check_word_order(request, config)
    if request.finish is not None:
        read_options(request)
    devices = accelerators.pick_devices(request.device)
    return _Options(config, devices, lengths.window_length(described, request.seq_len, SEQ_LEN))


def _quantize(request: Request, described: dict[str, Any], options: _Options) -> None:
    from quark.torch.export.checkpoint.config_json import keep_notes
    from quark.torch.graph.residency import release
    from quark.torch.quantization.api import ModelQuantizer

    config, devices, length = options
    source = models.describe_source(request.model_dir, described, "--model_dir")
    statistics = read_optional_statistics(request.statistics, request.check_digests)
    is_known = is_known_architecture(request, described)
    outline = read_outline(request.model_dir, request.trust_remote_code) if is_known else None
    request = _without_perplexity(request, outline)
    config = _fit(request, config, outline)
    is_calibrated = needs_data(config, statistics is not None) or request.finish is not None
    is_calibrated |= bool(config.algo_config) and not reads_text(outline)  # which run the model
    if not is_calibrated:
        warn_of_unread_data(request)
    if goes_through_files(request, described, config):
        _quantize_files(request, described, config, outline, source, length)
        return
    kind = kind_of_dataset(request, outline) if is_calibrated else None
    check_texts(request, is_calibrated)
    show_plan(request, config, described, source, describe(request, kind, length), outline)
    plan = _plan(request, described, config, devices, length, is_calibrated)
    if _stops_at(request, plan):
        return
    tokenizer = find_tokenizer(request, is_calibrated and kind is None)
    reader = find_reader(request, kind, tokenizer) if is_calibrated else None
    with open_journal(request, config) as journal:
        announce = note_output(request, journal)
        model = load(request, request.model_dir, devices[0], in_float=True)
        check_writable(request, model, config)
        if request.use_cache:
            model_checks.check_cache(model)  # with values, which steps may depend on
        with console.stage("reading data"):
            calibration = read_batches(request, kind, reader, length) if is_calibrated else None
            measures = prepare_measures(request, described, tokenizer) if rank() == 0 else None
        windows = None if measures is None else [measures.windows]
        coverage = measure_coverage(tokenizer, calibration, statistics, windows)
        has_steps = config.algo_config or request.finish  # which the journal knows
        steps = journal if has_steps else None
        quantizer = ModelQuantizer(config, False, request.offload_dir, steps, devices)
        outcome = _quantize_and_evaluate(
            request, model, quantizer, calibration, measures, statistics, devices[0]
        )
        if rank() > 0:
            return
        card = _card(request, config, outline, describe(request, kind, length), calibration)
        outcome.coverage = coverage
        card.add(outcome)
        keep_notes(model, coverage.notes())
        model_type = str(described.get("model_type", "model"))
        write(request, model, tokenizer, model_type, announce, card)
        release(model)  # which maps files of the journal, and Windows removes no mapped file
    show_outcome(request, outcome, plan)
    _report_figures(request, outcome.after)


def _fit(request: Request, config: Config, outline: nn.Module | None) -> Config:
    """Return the configuration as it fits a model, after the checks that need no values.

    Args:
        request: The flags.
        config: The configuration of the flags.
        outline: The model on the meta device, or None.

    Raises:
        typer.BadParameter: It does not fit.
    """
    config = fit_groups(request, config, outline)
    if why_not_kept(request):
        config = replace(config, keep_prequantized_layers=False)
    if outline is None:
        return config
    config = model_checks.check_outputs(outline, config)
    config = model_checks.check_patterns(request, outline, config)
    config = model_checks.leave_unpassed_in_float(outline, config)
    model_checks.check_layout(request, outline, config)
    return config


def _quantize_files(
    request: Request,
    described: dict[str, Any],
    config: Config,
    outline: nn.Module | None,
    source: str,
    length: int,
) -> None:
    """Quantize the files of the model, and evaluate what was written if that is requested."""
    calibration = describe(request, None, length)
    check_texts(request, is_calibrated=False)
    show_plan(request, config, described, source, calibration, outline, "file2file")
    devices = accelerators.pick_devices(request.device)
    plan = _plan(request, described, config, devices, length, False, through_files=True)
    if _stops_at(request, plan):
        return
    with open_journal(request, config) as journal:
        if rank() > 0:
            return
        announce = note_output(request, journal)
        tokenizer = find_tokenizer(request, False)
        measures = prepare_measures(request, described, tokenizer)
        card = _card(request, config, outline, calibration, None)
        outcome = quantize_files(request, described, config, tokenizer, card, announce)
        if measures is not None:
            model = load(request, request.output_dir, devices[0])
            outcome.after = measures.figures(model, "the quantized model")
    show_outcome(request, outcome, plan)
    _report_figures(request, outcome.after)


def _card(
    request: Request,
    config: Config,
    outline: nn.Module | None,
    data: str,
    batches: list[Any] | None,
) -> CardFacts:
    """Return what the model card tells before the model is quantized.

    Args:
        request: The flags.
        config: The configuration.
        outline: The model on the meta device, or None.
        data: Calibration data, in words.
        batches: The calibration data; None without.
    """
    from quark.torch.pipeline.statistics import digest, sequence_digests

    rows = scheme_rows(request, config)
    rows["in float"] = describe_float_layers(request, config, outline)
    if batches is None:
        return CardFacts(request, rows, "statistics" if request.statistics else "none needed")
    sequences = [*sequence_digests(batches)]
    words = data.replace(f"up to {request.num_calib_data}", str(len(sequences)), 1)
    return CardFacts(request, rows, words, digest(*sequences))


def _evaluate_unchanged(request: Request, described: dict[str, Any]) -> None:
    """Evaluate a float or already quantized model, and write it if requested."""
    if request.model_reload:
        described = models.read_config(request.reload_dir, "--import_model_dir")
    device = accelerators.pick_device(request.device)
    check_texts(request, is_calibrated=False)
    tokenizer = find_tokenizer(request, is_calibrated=False)
    if request.params_load:
        model = load_params(request, device)
    else:
        source = request.reload_dir if request.model_reload else request.model_dir
        model = load(request, source, device)
    check_writable(request, model, None)
    if request.use_cache:
        model_checks.check_cache(model)
    measures = prepare_measures(request, described, tokenizer)
    figures = None if measures is None else measures.figures(model, "the model")
    write(request, model, tokenizer, str(described.get("model_type", "model")))
    if figures is not None:
        words = console.format_perplexity(figures.predictions)
        console.out.print("", console.facts({"perplexity": words}))
    _report_figures(request, figures)
    if request.json:
        console.as_json({} if figures is None else figures.to_dict())


def _plan(
    request: Request, described: dict[str, Any], config: Config, *work: Any, **flow: Any
) -> RunPlan | None:
    """Return the plan of a run; None if headers give none: Transformers knows no such model.

    Raises:
        typer.BadParameter: The configuration does not fit the model.
    """
    has_files = request.model_dir.is_file() or any(request.model_dir.glob("*.safetensors"))
    if not has_files or not is_known_architecture(request, described):
        return None
    try:
        return make_plan(request, config, *work, **flow)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _stops_at(request: Request, plan: RunPlan | None) -> bool:
    """Print the plan if that is all that is asked for, else check it; return which it is.

    Raises:
        typer.BadParameter: There is no plan to print, or this machine has too little for the run.
        typer.Exit: This machine has too little for the plan that is printed.
    """
    if not request.plan:
        if plan is not None:
            check_plan(plan)
        return False
    if plan is None:
        raise console.wrong(
            "--plan",
            "plans are made from GGUF files, and from safetensors of models that Transformers "
            f"knows; {request.model_dir} has none. Leave it out.",
        )
    show_requirements(plan)
    if request.json and rank() == 0:
        console.as_json(plan.to_dict())
    if plan.problems:
        raise typer.Exit(1)
    return True


def _without_perplexity(request: Request, outline: nn.Module | None) -> Request:
    """Return a request that skips the evaluation where a model does not predict text.

    Raises:
        typer.BadParameter: An evaluation is requested explicitly.
    """
    if request.skip_evaluation or predicts_text(outline):
        return request
    for name in ("eval_data", "tasks", "save_metrics_to_csv", "use_ppl_eval_for_kv_cache"):
        if name in request.given:
            raise console.wrong(
                f"--{name}",
                f"{type(outline).__name__} does not predict the next token, so it has no "
                "perplexity. Leave it out.",
            )
    return replace(request, skip_evaluation=True)


def _quantize_and_evaluate(
    request: Request,
    model: nn.Module,
    quantizer: ModelQuantizer,
    calibration: list[Any] | None,
    measures: Measures | None,
    statistics: Statistics | None,
    device: str,
) -> Outcome:
    """Quantize and freeze the model in place, and evaluate it before and after."""
    from quark.torch.evaluation.samples import complete_batches
    from quark.torch.export.expert_tokens import expert_tokens

    model_checks.check_outputs(model, quantizer.config)
    if request.weight_matrix_merge:
        model_checks.check_shared_inputs(model)
    outcome = Outcome()
    batches = None if calibration is None else complete_batches(model, calibration)
    finish = None if request.finish is None else Finish(request, model, batches or [], device)
    seen = batches if finish is None else finish.seen
    quantizer.check_journal(model, seen, statistics)
    if measures is not None:
        outcome.before = measures.losses(model, "perplexity of the original")
    start = time.monotonic()
    with console.stage("quantizing"):
        model = quantizer.quantize_model(model, seen, statistics)
        if rank() > 0:  # the first process alone evaluates and writes
            return outcome
        model = quantizer.freeze(model)
        if finish is not None:
            outcome.finish = finish.run(model, quantizer.journal)
    outcome.seconds = time.monotonic() - start
    outcome.count_layers(model)
    outcome.experts = expert_tokens(model)
    if measures is not None:
        outcome.after = measures.figures(model, "the quantized model")
    return outcome


def _report_figures(request: Request, figures: Figures | None) -> None:
    """Print the scores of tasks, and write the metrics if requested."""
    if figures is None:
        return
    if figures.scores:
        show_scores({"the model" if not request.quantizes else "quantized": figures.scores})
    if request.save_metrics_to_csv:
        path = write_metrics(request.metrics_output_dir, figures)
        console.out.print(f"  metrics: {escape(str(path))}")
