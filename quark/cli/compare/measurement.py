"""The measurement of models one after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
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
    from quark.torch.report.comparison import ComparedModel, Comparison
    from quark.torch.report.continuation import Prompt


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements of each model.

    Attributes:
        load: Returns the model of a directory.
        windows: Token identifiers, (windows, length).
        source: Name of their text.
        batch_size: Windows that run together.
        kept: Bytes of the predictions of the first model that memory holds.
        tokenizer: Tokenizer of all models.
        prompt: Text to continue, or None.
        speed_tokens: Tokens that each model writes to measure its speed, 0 for no measurement.
        tasks: The tasks of lm-evaluation-harness; None for none.
        layers: Whether the weights of each layer are compared.
        trust_remote_code: Whether Python code of a model may run.
        max_memory: Bytes that this process may take; None for what there is.
    """

    load: Callable[[Path], nn.Module]
    windows: torch.Tensor
    source: str
    batch_size: int
    kept: int
    tokenizer: Any
    prompt: Prompt | None
    speed_tokens: int
    tasks: Tasks | None
    layers: bool
    trust_remote_code: bool
    max_memory: int | None


def measure_models(directories: dict[str, Path], plan: Plan) -> Comparison:
    """Measure models; the first is the one that the others are compared with.

    Args:
        directories: Name of a model -> its directory or file.
        plan: The measurements.
    """
    from quark.torch.evaluation.predictions import Reference
    from quark.torch.pipeline.activation_store import ActivationStore
    from quark.torch.report.comparison import Comparison
    from quark.torch.report.contents import Text

    with ActivationStore(plan.kept) as store:
        reference = Reference(store)
        original = next(iter(directories.values()))
        measured = [
            _measure(name, path, original, plan, reference) for name, path in directories.items()
        ]
    return Comparison(
        Text(plan.source, *plan.windows.shape),
        "" if plan.prompt is None else plan.prompt.text,
        measured,
    )


def _measure(
    label: str, directory: Path, original: Path, plan: Plan, reference: Reference
) -> ComparedModel:
    from quark.torch.export.recognition import read_contents, recognize_container
    from quark.torch.pipeline.allocator import return_free_memory
    from quark.torch.report.comparison import ComparedModel, weight_errors

    is_original, name = directory == original, Path(label).name
    with console.stage(f"loading {name}", spinner=True):
        model = plan.load(directory)
    start = time.monotonic()
    with console.stage(f"predictions of {name}"):
        predictions = _predict(model, name, plan, reference)
    seconds = time.monotonic() - start
    continuation = None
    if plan.prompt is not None:
        with console.stage(f"continuation of {name}", spinner=True):
            continuation = plan.prompt.answer(model)
    measures = Measures(
        plan.windows, plan.tokenizer, tasks=plan.tasks, task_batch=str(plan.batch_size)
    )
    scores = measures.scores(model, f"tasks of {name}")
    del model
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
        directory=label,
        schemes=summary.scheme_words(),
        bytes=models.weight_bytes(directory),
        bits_per_weight=summary.bits_per_weight,
        predictions=predictions,
        seconds=seconds,
        routers={} if is_original else reference.agreement,
        continuation=continuation,
        speed=speed,
        tasks={
            task: {metric: (score.value, score.error) for metric, score in metrics.items()}
            for task, metrics in scores.items()
        },
        weight_errors=errors,
    )


def _predict(model: nn.Module, name: str, plan: Plan, reference: Reference) -> Predictions:
    """Run the text; the first model becomes the reference of the others."""
    if reference.predictions is not None:
        return reference.compare(model, plan.windows, plan.batch_size, title=name)
    reference.run(model, plan.windows, plan.batch_size, title=name)
    assert reference.predictions is not None
    return reference.predictions
