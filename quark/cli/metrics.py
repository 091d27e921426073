"""Evaluation of models: perplexity and tasks. Data is loaded before any model."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark.cli import console, lengths, models
from quark.cli.console import wrong
from quark.cli.options import EVAL_WINDOWS, SEQ_LEN
from quark.cli.quantize.request import Request, split_names

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.evaluation.predictions import Predictions
    from quark.torch.evaluation.tasks import Score, Tasks

METRICS_FILE = "evaluation_metrics.csv"


@dataclass
class Figures:
    """Metrics of one model: losses of windows, (windows,) nats per token, and scores of tasks."""

    losses: torch.Tensor
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)

    @property
    def predictions(self) -> Predictions:
        """Its perplexity, and the standard error of that."""
        from quark.torch.evaluation.predictions import describe_losses

        return describe_losses(self.losses)

    @property
    def perplexity(self) -> float:
        """Its perplexity."""
        return self.predictions.perplexity

    def against(self, original: torch.Tensor) -> Predictions:
        """Return its perplexity beside that of the original, whose losses are given."""
        from quark.torch.evaluation.predictions import compare_losses

        return compare_losses(self.losses, original)

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as plain JSON types."""
        tasks = {
            task: {metric: score._asdict() for metric, score in metrics.items()}
            for task, metrics in self.scores.items()
        }
        found = self.predictions
        return {"perplexity": found.perplexity, "error": found.error, "tasks": tasks}


@dataclass
class Measures:
    """Evaluation data and settings."""

    windows: torch.Tensor
    tokenizer: Any
    context: int = 1  # tokens of a window that are not scored
    window_batch: int = 8
    tasks: Tasks | None = None
    task_batch: str = "8"
    max_task_batch: int = 64

    def losses(self, model: nn.Module, title: str) -> torch.Tensor:
        """Return the losses of a model, (windows,); the progress has a title."""
        from quark.torch.evaluation.perplexity import window_losses

        with console.stage(title):
            return window_losses(model, self.windows, self.window_batch, title, self.context)

    def scores(self, model: nn.Module, title: str) -> dict[str, dict[str, Score]]:
        """Return the scores of a model in all tasks."""
        if self.tasks is None:
            return {}
        with console.stage(title), _bars_on_terminals():
            return self.tasks.score(model, self.tokenizer, self.task_batch, self.max_task_batch)

    def figures(self, model: nn.Module, name: str) -> Figures:
        """Return losses and scores of a model."""
        losses = self.losses(model, f"perplexity of {name}")
        scores = self.scores(model, f"tasks of {name}")
        return Figures(losses, scores)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Hide progress bars of the harness unless the output is a terminal."""
    with nullcontext() if console.err.is_terminal else redirect_stderr(io.StringIO()):
        yield


def prepare_measures(
    request: Request, described: dict[str, Any], tokenizer: Any
) -> Measures | None:
    """Return the evaluation data of ``quark quantize``; None with ``--skip_evaluation``.

    Raises:
        typer.BadParameter: A text or task does not exist, or windows are too long for the model.
    """
    if request.skip_evaluation:
        return None
    after_context = request.use_ppl_eval_for_kv_cache
    windows = _cache_windows if after_context else _plain_windows
    return Measures(
        windows(request, described, tokenizer),
        tokenizer,
        context=request.ppl_eval_for_kv_cache_context_size if after_context else 1,
        window_batch=request.evaluation_batch,
        tasks=find_tasks(
            request.tasks,
            request.include_path,
            request.num_fewshot,
            question_limit(request.num_eval_data),
            request.apply_chat_template,
        ),
        task_batch=request.eval_batch_size,
        max_task_batch=request.max_eval_batch_size,
    )


def _plain_windows(request: Request, described: dict[str, Any], tokenizer: Any) -> torch.Tensor:
    wanted, default, flag = request.seq_len, SEQ_LEN, "--seq_len"
    if request.eval_seq_len is not None:
        is_typed, flag = "eval_seq_len" in request.given, "--eval_seq_len"
        wanted, default = (request.eval_seq_len, 0) if is_typed else (None, request.eval_seq_len)
    length = lengths.window_length(described, wanted, default, flag)
    limit = EVAL_WINDOWS if request.num_eval_data is None else max(request.num_eval_data, 0)
    return models.text_windows(request.eval_data, "--eval_data", tokenizer, length, limit, True)


def _cache_windows(request: Request, described: dict[str, Any], tokenizer: Any) -> torch.Tensor:
    """Return windows of a context and the tokens to score, which overlap to score all text once."""
    step = request.ppl_eval_for_kv_cache_sample_size
    length = lengths.window_length(
        described,
        request.ppl_eval_for_kv_cache_context_size + step,
        0,
        "--ppl_eval_for_kv_cache_context_size",
    )
    wanted = request.ppl_eval_for_kv_cache_patch_size or question_limit(request.num_eval_data)
    limit = 0 if wanted is None else length + (wanted - 1) * step
    row = models.text_windows(request.eval_data, "--eval_data", tokenizer, 1, limit, True)
    if len(row) < length:
        raise wrong("--eval_data", f"it has {len(row)} tokens, fewer than one window of {length}.")
    return row.flatten().unfold(0, length, step)


def question_limit(wanted: int | None) -> int | None:
    """Return the maximum number of questions per task; None for all (0 or -1 as a flag)."""
    return wanted if wanted is not None and wanted > 0 else None


def find_tasks(
    names: str | None,
    include_path: str | None,
    num_fewshot: int | None,
    limit: int | None,
    apply_chat_template: bool,
) -> Tasks | None:
    """Return the tasks of comma-separated names, with their data loaded.

    Raises:
        typer.BadParameter: A task is unknown, or the harness or data is missing.
    """
    if names is None:
        return None
    from quark.torch.evaluation.tasks import Tasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if include_path is not None and not Path(include_path).is_dir():
        raise wrong("--include_path", f"there is no directory {include_path}.")
    chosen = split_names([names])
    if not chosen:
        raise wrong("--tasks", "expected names of tasks, separated by commas.")
    try:
        with console.stage("finding tasks"), _bars_on_terminals():
            return Tasks(chosen, include_path, num_fewshot, limit, apply_chat_template)
    except (ImportError, OSError, ValueError) as error:
        raise wrong("--tasks", str(error)) from None


def show_scores(scores: dict[str, dict[str, dict[str, Score]]]) -> None:
    """Print a table of tasks with one column per model.

    Args:
        scores: Model -> task -> metric -> score. All models have the same tasks.
    """
    table = console.table()
    table.add_column("task", overflow="fold")
    table.add_column("metric")
    for model in scores:
        table.add_column(escape(model), justify="right")
    columns = list(scores.values())
    for task, metrics in columns[0].items():
        for metric in metrics:
            cells = [_format_score(column[task][metric]) for column in columns]
            table.add_row(escape(task), escape(metric), *cells)
    console.out.print("", table)


def _format_score(score: Score) -> str:
    return f"{score.value:.4f}" + ("" if score.error is None else f" ± {score.error:.4f}")


def write_metrics(directory: Path, figures: Figures) -> Path:
    """Write the metrics as CSV lines ``name,value`` and return the path."""
    rows = [("Perplexity", figures.perplexity)]
    for task, metrics in figures.scores.items():
        rows += [(f"{task} {metric}", score.value) for metric, score in metrics.items()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / METRICS_FILE
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path
