"""``quark evaluate``: perplexity and tasks of a model and of its original."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from quark.cli import accelerators, console, lengths, models
from quark.cli.memory_check import Measurement, check_measurement
from quark.cli.metrics import Figures, Measures, find_tasks, show_scores
from quark.cli.model_files import find_model
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    ChatTemplate,
    CheckDigests,
    DataTypeFlag,
    DeviceFlag,
    IncludePath,
    Json,
    MaxMemory,
    NumFewshot,
    Runtime,
    Tasks,
    TrustRemoteCode,
    add_verb,
    check_task_flags,
    counted_windows,
    panel,
)
from quark.cli.originals import check_original
from quark.cli.predicted_text import check_predicts_text

if TYPE_CHECKING:
    from torch import nn

_REMEDY = "'quark report' without --dataset measures the errors of its weights."
HELP = """
Measure the perplexity of a model, and compare it with the original.

Lower perplexity is better. The change from the original is the cost of
quantization. Both models receive the same windows of tokens. With [cyan]--tasks[/cyan],
both models are also scored in tasks of lm-evaluation-harness.

[bold]Examples[/bold]

  On text that is part of Python, the documentation of modules:

    [cyan]quark evaluate my-model-int4 --original my-model[/cyan]

  On all of your own text, in windows of 2048 tokens:

    [cyan]quark evaluate my-model-int4 --original my-model --dataset my.txt \\
      --seq_len 2048 --limit 0[/cyan]

  In tasks of lm-evaluation-harness and your own tasks:

    [cyan]quark evaluate my-model-int4 --original my-model \\
      --tasks gsm8k,my_task --include_path my-tasks[/cyan]
"""

_text, _model = panel("Text"), panel("Model")

ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="Directory of the model, or OWNER/NAME.")
]
Original = Annotated[
    Path | None,
    _model("--original", metavar="DIR", help="The original float model, likewise."),
]
Dataset = Annotated[
    str | None,
    _text(
        "--dataset",
        metavar="FILE|NAME",
        help="Text: a .txt, .md, .jsonl, .json, .csv or .parquet file, a directory, wikitext, "
        f"pileval, cnn_dailymail, or another dataset of the Hub (default: {models.EVALUATION}).",
    ),
]
SeqLen = Annotated[
    int | None,
    _text(
        "--seq_len",
        metavar="N",
        min=2,
        help=f"Tokens per window (default {SEQ_LEN}; at most the limit of the model).",
    ),
]
Limit = Annotated[
    int, _text("--limit", metavar="N", min=0, help="Maximum number of windows (0 = all).")
]
BatchSize = Annotated[
    int,
    _text("--batch_size", metavar="N", min=1, help="Windows, or questions, per batch."),
]
TaskLimit = Annotated[
    int | None,
    panel("Evaluation")(
        "--task_limit",
        metavar="N",
        min=1,
        help="Maximum number of questions per task (default: all).",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "evaluate", evaluate, HELP)


@dataclass(frozen=True)
class _Row:
    """The figures of one model."""

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
    max_memory: MaxMemory = None,
    runtime: Runtime = "exact",
    trust_remote_code: TrustRemoteCode = False,
    check_digests: CheckDigests = False,
    as_json: Json = False,
) -> None:
    """Evaluate one or two models on the same windows and tasks."""
    models.check_runtime(runtime, max_memory)
    options: Any = {"include_path": include_path, "num_fewshot": num_fewshot}
    options |= {"task_limit": task_limit, "apply_chat_template": apply_chat_template or None}
    check_task_flags(tasks, [name for name, value in options.items() if value is not None])
    names = [str(path) for path in (original, model_dir) if path is not None]
    model_dir = find_model(model_dir, "MODEL_DIR")
    original = None if original is None else find_model(original, "--original")
    described = models.read_config(model_dir, "MODEL_DIR")
    if original is not None:
        check_original(model_dir, original, "MODEL_DIR")
    length = lengths.window_length(described, seq_len, SEQ_LEN)
    directories = [model_dir] if original is None else [original, model_dir]
    place: Any = {"device": accelerators.pick_device(device), "max_memory": max_memory}
    place |= {"trust_remote_code": trust_remote_code, "dtype": data_type}
    work: Any = {"evaluated": counted_windows(limit), "evaluated_batch": batch_size}
    for directory in directories:
        is_checked = check_digests and directory is model_dir
        models.check_model(directory, trust_remote_code, is_checked)
        check_predicts_text(directory, "MODEL_DIR", _REMEDY, trust_remote_code)
        check_measurement(
            Measurement(source=directory, length=length, **work, keeps_codes=True, **place)
        )
    with console.stage("reading text"):
        # A checkpoint may lack a tokenizer; the original has one.
        source, flag = (model_dir, "MODEL_DIR") if original is None else (original, "--original")
        tokenizer = models.load_tokenizer(source, flag, trust_remote_code)
        windows = models.text_windows(dataset, "--dataset", tokenizer, length, limit, True)
    chosen = find_tasks(tasks, include_path, num_fewshot, task_limit, apply_chat_template)
    measures = Measures(
        windows, tokenizer, window_batch=batch_size, tasks=chosen, task_batch=str(batch_size)
    )
    load = partial(models.load_model, runtime=runtime, **place)
    if max_memory is not None:
        _check_room(directories, load, measures)
    rows = [
        _measure(name, directory, load, measures)
        for name, directory in zip(names, directories, strict=True)
    ]
    _show(rows, windows.shape, dataset or models.EVALUATION, as_json)


def _show(rows: list[_Row], shape: tuple[int, ...], text: str, as_json: bool) -> None:
    """Print the figures of all models on windows of a text, (windows, length)."""
    if as_json:
        sizes = {"windows": shape[0], "seq_len": shape[1]}
        console.as_json({"text": text, **sizes, **_as_records(rows)})
    else:
        _print_rows(rows, f"{shape[0]} windows of {shape[1]} tokens: {text}")


def _check_room(
    directories: list[Path], load: Callable[[Path], nn.Module], measures: Measures
) -> None:
    """Check that a bound of memory leaves room for the evaluation of all models, before the first.

    Raises:
        ValueError: There is too little for one of them.
    """
    from quark.torch.evaluation.perplexity import check_room

    for directory in directories:
        check_room(load(directory), measures.windows, measures.window_batch)
        _free_models()


def _free_models() -> None:
    """Give the memory of models that are not used any more back to the system."""
    from quark.torch.pipeline.allocator import return_free_memory

    gc.collect()  # modules and what loads their parameters refer to each other
    return_free_memory()


def _measure(
    name: str, directory: Path, load: Callable[[Path], nn.Module], measures: Measures
) -> _Row:
    from quark.torch.export.recognition import read_contents

    title = Path(name).name
    with console.stage(f"loading {title}", spinner=True):
        model = load(directory)
    start = time.monotonic()
    figures = measures.figures(model, title)
    seconds = time.monotonic() - start
    del model
    _free_models()
    summary = read_contents(directory).summary
    size = models.weight_bytes(directory)
    return _Row(name, figures, size, summary.bits_per_weight, seconds)


def _as_records(rows: list[_Row]) -> dict[str, Any]:
    """Return the figures of all models, and the change of the perplexity, for JSON."""
    last = rows[-1].figures.against(rows[0].figures.losses)
    is_compared = len(rows) > 1
    return {
        "models": [_as_record(row) for row in rows],
        "change": last.change if is_compared else None,
        "change_error": last.change_error if is_compared else None,
    }


def _as_record(row: _Row) -> dict[str, Any]:
    """Return a row as plain JSON types."""
    data = asdict(row)
    del data["figures"]
    return data | row.figures.to_dict()


def _print_rows(rows: list[_Row], caption: str) -> None:
    table = console.table()
    table.add_column("model", overflow="fold")
    for column in ("bits/weight", "size", "perplexity", "change", "seconds"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        found = row.figures.against(rows[0].figures.losses)
        table.add_row(
            escape(row.model),
            console.format_bits(row.bits_per_weight),
            console.format_bytes(row.bytes),
            f"{found.perplexity:.2f}" + ("" if found.error is None else f" ± {found.error:.2f}"),
            "" if row is rows[0] else console.format_paired_change(found),
            f"{row.seconds:.1f}",
        )
    console.out.print("", table)
    console.out.print(f"  {escape(caption)}\n", style="dim")
    if rows[0].figures.scores:
        show_scores({row.model: row.figures.scores for row in rows})
