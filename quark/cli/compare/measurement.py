"""The measurement of models: one after the other, or in turn if they are read in parts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli import console, models
from quark.cli.compare.speed import measure_in_process
from quark.cli.metrics import Measures

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.evaluation.predictions import Predictions, Reference
    from quark.torch.evaluation.tasks import Tasks
    from quark.torch.pipeline.interleaved_passes import Steps
    from quark.torch.report.comparison import ComparedModel, Comparison
    from quark.torch.report.continuation import Prompt


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements of each model.

    Attributes:
        load: Returns the model of a directory.
        windows: Token identifiers, (windows, length).
        source: Name of their text.
        batch_size: Windows that run group_names.
        kept: Bytes of the predictions of the first model that memory holds.
        tokenizer: Tokenizer of all models.
        prompt: Text to continue, or None.
        speed_tokens: Tokens that each model writes to measure its speed, 0 for no measurement.
        runtime: How quantized layers compute: the value of ``--runtime``.
        tasks: The tasks of lm-evaluation-harness; None for none.
        layers: Whether the weights of each layer are compared.
        trust_remote_code: Whether Python code of a model may run.
        max_memory: Bytes that this process may take; None for what there is.
        streams: Whether models are read in parts. Then they run side by side, block by block.
    """

    load: Callable[[Path], nn.Module]
    windows: torch.Tensor
    source: str
    batch_size: int
    kept: int
    tokenizer: Any
    prompt: Prompt | None
    speed_tokens: int
    runtime: str
    tasks: Tasks | None
    layers: bool
    trust_remote_code: bool
    max_memory: int | None
    streams: bool


@dataclass
class _Run:
    """A model that has run on the text.

    Attributes:
        label: Its path as given, or its name on the Hub.
        name: What tables call it.
        directory: Its directory or file.
        model: The model; None once it is not needed any more.
        predictions: Its predictions.
        routers: See ``ComparedModel``.
        seconds: Time that the text took.
    """

    label: str
    name: str
    directory: Path
    model: nn.Module | None
    predictions: Predictions
    routers: dict[str, float]
    seconds: float


def measure_models(directories: dict[str, Path], plan: Plan) -> Comparison:
    """Measure models; the first is the one that the others are compared with.

    Args:
        directories: Path of a model as given, or its name on the Hub -> its directory or file.
        plan: The measurements.
    """
    from quark.torch.evaluation.predictions import Reference
    from quark.torch.pipeline.activation_store import ActivationStore
    from quark.torch.report.comparison import Comparison, short_names
    from quark.torch.report.contents import Text

    original, names = next(iter(directories.values())), short_names(directories)
    # Memory holds one model at a time. Of models that are read in parts it holds no more.
    groups = [directories] if plan.streams else [{n: path} for n, path in directories.items()]
    with ActivationStore(plan.kept) as store:
        reference = Reference(store)
        measured = [
            _measure(run, original, plan)
            for group in groups
            for run in _run_text(group, names, plan, reference)
        ]
    return Comparison(
        Text(plan.source, *plan.windows.shape),
        "" if plan.prompt is None else plan.prompt.text,
        measured,
        plan.runtime,
    )


def _run_text(
    group: dict[str, Path], names: Mapping[str, str], plan: Plan, reference: Reference
) -> list[_Run]:
    """Load models, and run them on the text, in turn if there are several."""
    from quark.torch.pipeline.interleaved_passes import Pass, run_in_turn

    group_names = ", ".join(names[label] for label in group)
    with console.stage(f"loading {group_names}", spinner=True):
        loaded = [plan.load(directory) for directory in group.values()]
    is_first = reference.predictions is None
    passes = [
        Pass(model, _steps(model, names[label], is_first and not number, plan, reference))
        for number, (label, model) in enumerate(zip(group, loaded, strict=True))
    ]
    with console.stage(f"predictions of {group_names}"):
        if plan.streams:
            outcomes = run_in_turn(passes, reference.drop_predictions)
        else:
            outcomes = run_in_turn(passes)
    runs = []
    for (label, path), model, (result, seconds) in zip(
        group.items(), loaded, outcomes, strict=True
    ):
        predictions, routers = result
        runs.append(_Run(label, names[label], path, model, predictions, routers, seconds))
    return runs


def _steps(
    model: nn.Module, title: str, is_first: bool, plan: Plan, reference: Reference
) -> Steps[tuple[Predictions, dict[str, float]]]:
    """Return a pass of the text, whose result is the predictions and the agreement of routers."""
    text = model, plan.windows, plan.batch_size
    if is_first:  # the reference of the others
        return (yield from reference.run_steps(*text, title)), {}
    return (yield from reference.compare_steps(*text, title=title)), reference.agreement


def _measure(run: _Run, original: Path, plan: Plan) -> ComparedModel:
    """Measure what does not depend on other models, and release the model."""
    from quark.torch.export.recognition import read_contents, recognize_container
    from quark.torch.pipeline.allocator import return_free_memory
    from quark.torch.report.comparison import ComparedModel, weight_errors

    directory, model, name = run.directory, run.model, run.name
    assert model is not None
    is_original = directory == original
    continuation = None
    if plan.prompt is not None:
        with console.stage(f"continuation of {name}", spinner=True):
            continuation = plan.prompt.answer(model)
    measures = Measures(
        plan.windows, plan.tokenizer, tasks=plan.tasks, task_batch=str(plan.batch_size)
    )
    scores = measures.scores(model, f"tasks of {name}")
    del model
    run.model = None
    gc.collect()  # modules and what loads their parameters refer to each other
    return_free_memory()
    speed = None
    if plan.speed_tokens:
        with console.stage(f"speed of {name}", spinner=True):
            tokens = plan.windows[0].tolist()
            speed = measure_in_process(plan.load, directory, tokens, plan.speed_tokens)
    errors: dict[str, float | None] = {}
    if plan.layers and not is_original and recognize_container(directory).is_quantized(directory):
        with console.stage(f"weights of {name}"):
            errors = weight_errors(directory, original, plan.trust_remote_code, plan.max_memory)
    summary = read_contents(directory).summary
    return ComparedModel(
        directory=run.label,
        name=name,
        schemes=summary.scheme_words(),
        bytes=models.weight_bytes(directory),
        bits_per_weight=summary.bits_per_weight,
        predictions=run.predictions,
        seconds=run.seconds,
        routers=run.routers,
        continuation=continuation,
        speed=speed,
        tasks={
            task: {metric: (score.value, score.error) for metric, score in metrics.items()}
            for task, metrics in scores.items()
        },
        weight_errors=errors,
    )
