"""Tasks of lm-evaluation-harness on a model in memory.

Tasks and their data are loaded before a model is, so that missing ones are reported at once.

    tasks = Tasks(["gsm8k", "my_task"], include_path="my_tasks")
    tasks.score(model, tokenizer)["my_task"]["acc"].value
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from quark.torch.graph.float_products import float_products

RESAMPLES = 100  # of a metric whose standard error has no formula


class Score(NamedTuple):
    """The value of a metric, and its standard error if it has one."""

    value: float
    error: float | None


class Tasks:
    """Tasks and the options of their evaluation.

    Args:
        names: Names of tasks, groups or tags, or patterns with ``*``.
        include_path: Directory of additional task files.
        num_fewshot: Number of examples before each question, None for the default of each task.
        limit: Maximum number of questions per task, None for all.
        apply_chat_template: Whether to format questions with the chat template of the tokenizer.

    Raises:
        ImportError: The library lm_eval is not installed.
        FileNotFoundError: The data of a task cannot be found or reached.
        ValueError: A task is unknown, or its file is invalid.
    """

    def __init__(
        self,
        names: Sequence[str],
        include_path: str | Path | None = None,
        num_fewshot: int | None = None,
        limit: int | None = None,
        apply_chat_template: bool = False,
    ) -> None:
        self._library = _import_library()
        self._options = {
            "num_fewshot": num_fewshot,
            "limit": limit,
            "apply_chat_template": apply_chat_template,
        }
        path = None if include_path is None else str(include_path)
        self._manager = import_module("lm_eval.tasks").TaskManager(include_path=path)
        self.names = self._manager.match_tasks(list(names))
        for name in names:
            if not self._manager.match_tasks([name]):
                raise ValueError(
                    f"there is no task {name!r}. 'lm-eval ls tasks' lists those of the library; "
                    "the files of your own lie in the directory of include_path"
                )
        try:
            self._manager.load(self.names)
        except OSError as error:  # includes "not found" and "offline" of the datasets library
            raise FileNotFoundError(
                f"data of {', '.join(names)} cannot be reached: {error}. Check the connection, or "
                "give tasks on local files by include_path"
            ) from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"{', '.join(names)} cannot be loaded: {error}") from error

    def score(
        self,
        model: nn.Module,
        tokenizer: Any,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
    ) -> dict[str, dict[str, Score]]:
        """Evaluate a model on the tasks.

        Args:
            model: Causal language model of Transformers. It is put in evaluation mode.
            tokenizer: Its tokenizer.
            batch_size: Number of questions per forward pass; ``auto`` or ``auto:N`` for as many as
                fit in memory.
            max_batch_size: Maximum batch size for ``auto``.

        Returns:
            Task or group of tasks -> metric -> score. A metric of answers that pass through a
            filter is named ``metric (filter)``.
        """
        language_model = import_module("lm_eval.models.huggingface").HFLM
        with _prevent_tying(model), float_products():
            wrapped = language_model(
                pretrained=model,
                tokenizer=tokenizer,
                backend="causal",
                batch_size=batch_size,
                max_batch_size=max_batch_size,
            )
            report = self._library.simple_evaluate(
                model=wrapped,
                tasks=self.names,
                task_manager=self._manager,
                log_samples=False,
                bootstrap_iters=RESAMPLES,
                **self._options,
            )
        results = {**report["results"], **report.get("groups", {})}
        return {task: _scores(figures) for task, figures in results.items()}


def _import_library() -> Any:
    try:
        return import_module("lm_eval")
    except ImportError as error:
        raise ImportError(
            "tasks need lm-evaluation-harness: pip install lm_eval (or install this package with "
            'its "tasks" extra)'
        ) from error


@contextmanager
def _prevent_tying(model: nn.Module) -> Iterator[None]:
    """Keep the library from tying weights: a quantized output head has a weight of its own."""
    model.tie_weights = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.tie_weights


def _scores(figures: Mapping[str, Any]) -> dict[str, Score]:
    """Return metric -> score from the results of a task: "acc,none", "acc_stderr,none"."""
    scores = {}
    for key, value in figures.items():
        metric, comma, answer_filter = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
            continue
        error = figures.get(f"{metric}_stderr,{answer_filter}")
        name = metric if answer_filter == "none" else f"{metric} ({answer_filter})"
        scores[name] = Score(float(value), error if isinstance(error, float) else None)
    return scores
