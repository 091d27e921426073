"""``quark evaluate``: perplexity and tasks of a model, beside the original's."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from quark.cli import console, models
from quark.cli.metrics import Figures, Measures, find_tasks, show_scores
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    ChatTemplate,
    DataTypeFlag,
    DeviceFlag,
    IncludePath,
    Json,
    NumFewshot,
    Tasks,
    TrustRemoteCode,
    Verbose,
    panel,
)

HELP = """
Measure the perplexity of a model, quantized or not, and of the original beside it.
With [cyan]--tasks[/cyan], score both in tasks of lm-evaluation-harness as well.

Perplexity says how surprised a model is by text: the lower the better, and what counts is the
change from the original. Both models are given the very same windows of tokens.

[bold]Examples[/bold]

  On text that comes with Python, the documentation of modules:

    [cyan]quark evaluate my-model-int4 --original my-model[/cyan]

  On text of your own, all of it, in windows of 2048 tokens:

    [cyan]quark evaluate my-model-int4 --original my-model --dataset my.txt \\
      --seq_len 2048 --limit 0[/cyan]

  In tasks of lm-evaluation-harness, those of your own included:

    [cyan]quark evaluate my-model-int4 --original my-model \\
      --tasks gsm8k,my_task --include_path my-tasks[/cyan]
"""

_text, _model = panel("Text"), panel("Model")

ModelDir = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Directory of the model.")]
Original = Annotated[
    Path | None,
    _model("--original", metavar="DIR", help="Directory of the model it was quantized from."),
]
Dataset = Annotated[
    str | None,
    _text(
        "--dataset",
        metavar="FILE|NAME",
        help="A .txt, .jsonl, .json, .csv or .parquet file, a directory, wikitext, pileval, "
        f"cnn_dailymail, or another dataset of the Hub. Without it: held-out {models.EMBEDDED}.",
    ),
]
SeqLen = Annotated[
    int | None,
    _text(
        "--seq_len",
        metavar="N",
        min=2,
        help=f"Tokens of a window: {SEQ_LEN}, or what the model takes if that is less.",
    ),
]
Limit = Annotated[int, _text("--limit", metavar="N", min=0, help="Most windows; 0 for all.")]
BatchSize = Annotated[
    int,
    _text("--batch_size", metavar="N", min=1, help="Windows, or questions, that run together."),
]
TaskLimit = Annotated[
    int | None,
    panel("Evaluation")("--task_limit", metavar="N", min=1, help="Most questions of a task: all."),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("evaluate", help=HELP)(evaluate)


@dataclass(frozen=True)
class _Row:
    """One model: its figures."""

    model: str
    figures: Figures
    bytes: int
    bits_per_weight: float | None
    seconds: float


def evaluate(
    model_dir: ModelDir,
    original: Original = None,
    dataset: Dataset = None,
    seq_len: SeqLen = None,
    limit: Limit = EVAL_WINDOWS,
    batch_size: BatchSize = 8,
    tasks: Tasks = None,
    include_path: IncludePath = None,
    num_fewshot: NumFewshot = None,
    apply_chat_template: ChatTemplate = False,
    task_limit: TaskLimit = None,
    data_type: DataTypeFlag = "auto",
    device: DeviceFlag = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Evaluate one model or two on the same windows and tasks."""
    described = models.read_config(model_dir, "MODEL_DIR")
    if original is not None:
        models.read_config(original, "--original")
    length = models.window_length(described, seq_len, SEQ_LEN)
    target = models.pick_device(device)
    with console.stage("reading text"):
        # The original's files are sure to be complete; a checkpoint may lack a tokenizer.
        source, flag = (model_dir, "MODEL_DIR") if original is None else (original, "--original")
        tokenizer = models.load_tokenizer(source, flag, trust_remote_code)
        windows = models.text_windows(dataset, "--dataset", tokenizer, length, limit, True)
    chosen = find_tasks(tasks, include_path, num_fewshot, task_limit, apply_chat_template)
    measures = Measures(
        windows, tokenizer, window_batch=batch_size, tasks=chosen, task_batch=str(batch_size)
    )
    rows = []
    for directory in (original, model_dir):
        if directory is not None:
            with console.stage(f"loading {directory.name}", spinner=True):
                model = models.load_model(directory, data_type, target, trust_remote_code)
            rows.append(_measure(directory, model, measures))
            del model
    text = dataset or f"held-out {models.EMBEDDED}"
    if as_json:
        first, last = (row.figures.perplexity for row in (rows[0], rows[-1]))
        change = last / first - 1 if len(rows) > 1 else None
        shape = {"windows": windows.shape[0], "seq_len": windows.shape[1]}
        found = [_flat(row) for row in rows]
        console.as_json({"text": text, **shape, "models": found, "change": change})
    else:
        _show(rows, f"{windows.shape[0]} windows of {windows.shape[1]} tokens: {text}")


def _measure(directory: Path, model: Any, measures: Measures) -> _Row:
    start = time.monotonic()
    figures = measures.figures(model, directory.name)
    seconds = time.monotonic() - start
    summary, _ = models.read_summary(directory)
    size = models.weight_bytes(directory)
    return _Row(str(directory), figures, size, summary.bits_per_weight, seconds)


def _flat(row: _Row) -> dict[str, Any]:
    """Return a row as it is printed for programs."""
    data = asdict(row)
    figures = data.pop("figures")
    tasks = {
        task: {metric: score._asdict() for metric, score in metrics.items()}
        for task, metrics in row.figures.scores.items()
    }
    return {**data, "perplexity": figures["perplexity"], "tasks": tasks}


def _show(rows: list[_Row], caption: str) -> None:
    table = console.table()
    table.add_column("model", overflow="fold")
    for column in ("bits/weight", "size", "perplexity", "change", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    base = rows[0].figures.perplexity
    for row in rows:
        found = row.figures.perplexity
        change = "" if row is rows[0] else console.in_percent(found, base)
        table.add_row(
            escape(row.model),
            console.in_bits(row.bits_per_weight),
            console.in_bytes(row.bytes),
            f"{found:.2f}",
            change,
            f"{row.seconds:.1f}",
        )
    console.out.print("", table)
    console.out.print(f"  {escape(caption)}\n", style="dim")
    if rows[0].figures.scores:
        show_scores({row.model: row.figures.scores for row in rows})
