"""``quark compare``: models side by side, with standard errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quark.cli import accelerators, console, lengths, models
from quark.cli.compare.measurement import Plan, measure_models
from quark.cli.compare.tables import print_comparison
from quark.cli.memory_check import Measurement, check_measurement
from quark.cli.metrics import find_tasks
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
    verb,
)
from quark.cli.outputs import check_page
from quark.cli.predicted_text import check_predicts_text
from quark.cli.prompts import NEW_TOKENS, NewTokens, PromptText, check_prompt, read_prompt

if TYPE_CHECKING:
    from torch import nn

HELP = """
Compare models: size, perplexity, divergence, answers and speed, side by side.

The first model is the one that the others are compared with: the original, or
another result. Figures have standard errors over windows of text. Changes of
the perplexity are paired, so that small ones can be told from chance.

[bold]Examples[/bold]

    [cyan]quark compare my-model my-model-int4 my-model-fp8[/cyan]

  With the weights of each layer, as a page and as JSON:

    [cyan]quark compare my-model my-model-int4 my-model-fp8 --layers --output comparison.html[/cyan]

  What they answer:

    [cyan]quark compare my-model my-model-int4 --apply_chat_template \\
      --prompt "Why is the sky blue?" --new_tokens 64[/cyan]
"""

SPEED_TOKENS = 32

_text, _output, _speed = panel("Text"), panel("Output"), panel("Speed")


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """The flags of ``quark compare``; see its help."""

    original: Annotated[
        Path,
        typer.Argument(
            metavar="ORIGINAL", help="The model to compare with: a directory, or OWNER/NAME."
        ),
    ]
    others: Annotated[list[Path], typer.Argument(metavar="MODEL …", help="Other models.")]
    dataset: Annotated[
        str | None,
        _text(
            metavar="FILE|NAME",
            help="Text: a .txt, .md, .jsonl, .json, .csv or .parquet file, a directory, wikitext, "
            f"pileval, or another dataset of the Hub (default: {models.EVALUATION}).",
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        _text(
            metavar="N",
            min=2,
            help=f"Tokens per window (default {SEQ_LEN}; at most the limit of the model).",
        ),
    ] = None
    limit: Annotated[
        int, _text(metavar="N", min=0, help="Maximum number of windows (0 = all).")
    ] = EVAL_WINDOWS
    batch_size: Annotated[int, _text(metavar="N", min=1, help="Windows per batch.")] = 8
    prompt: PromptText = None
    new_tokens: NewTokens = NEW_TOKENS
    speed: Annotated[
        bool,
        _speed(
            help="Measure the speed and the memory of each model too, in a process of its own: "
            f"a window as prompt, then {SPEED_TOKENS} tokens, several times.",
        ),
    ] = False
    tasks: Tasks = None
    include_path: IncludePath = None
    num_fewshot: NumFewshot = None
    apply_chat_template: ChatTemplate = False
    layers: Annotated[
        bool,
        _output(help="Compare the weights of each layer too. The first model is the original."),
    ] = False
    output: Annotated[
        Path | None,
        _output(
            metavar="FILE",
            help="Page to write; the numbers go to the same name with .json.",
        ),
    ] = None
    overwrite: Annotated[bool, _output(help="Replace existing files.")] = False
    data_type: DataTypeFlag = "auto"
    device: DeviceFlag = "auto"
    max_memory: MaxMemory = None
    runtime: Runtime = "exact"
    trust_remote_code: TrustRemoteCode = False
    check_digests: CheckDigests = False
    as_json: Json = False
    given: frozenset[str] = frozenset()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "compare", verb(CompareRequest, _compare_models), HELP)


def _compare_models(request: CompareRequest) -> None:
    _check_flags(request, [request.original, *request.others])
    names = [str(request.original), *map(str, request.others)]
    request = replace(
        request,
        original=find_model(request.original, "ORIGINAL"),
        others=[find_model(path, "MODEL") for path in request.others],
    )
    directories = [request.original, *request.others]
    described = models.read_config(request.original, "ORIGINAL")
    for directory in request.others:
        _check_vocabulary(described, models.read_config(directory, "MODEL"), directory)
    length = lengths.window_length(described, request.seq_len, SEQ_LEN)
    device = accelerators.pick_device(request.device)
    _check_models(request, directories, length, device)
    with console.stage("reading text"):
        tokenizer = models.load_tokenizer(request.original, "ORIGINAL", request.trust_remote_code)
        windows = models.text_windows(
            request.dataset, "--dataset", tokenizer, length, request.limit, True
        )
    tasks = find_tasks(
        request.tasks, request.include_path, request.num_fewshot, None, request.apply_chat_template
    )
    from quark.torch.pipeline.memory_limit import results_limit

    streams = _is_streamed(request, directories, device)
    comparison = measure_models(
        dict(zip(names, directories, strict=True)),
        Plan(
            load=_loader(request, device),
            windows=windows,
            source=request.dataset or models.EVALUATION,
            batch_size=1 if streams else request.batch_size,
            kept=results_limit(streams, request.max_memory, device),
            tokenizer=tokenizer,
            prompt=read_prompt(
                request.prompt,
                request.new_tokens,
                tokenizer,
                windows,
                request.apply_chat_template,
            ),
            speed_tokens=SPEED_TOKENS if request.speed else 0,
            runtime=request.runtime,
            tasks=tasks,
            layers=request.layers,
            trust_remote_code=request.trust_remote_code,
            max_memory=request.max_memory,
            streams=streams,
        ),
    )
    numbers = comparison.to_dict()
    if request.output is not None:
        _write(request.output, numbers)
    if request.as_json:
        console.as_json(numbers)
    else:
        print_comparison(comparison, request.output)


def _loader(request: CompareRequest, device: str) -> Callable[[Path], nn.Module]:
    """Return the function that loads the model of a directory."""
    return partial(
        models.load_model,
        dtype=request.data_type,
        device=device,
        trust_remote_code=request.trust_remote_code,
        max_memory=request.max_memory,
        runtime=request.runtime,
    )


def _check_flags(request: CompareRequest, directories: list[Path]) -> None:
    """Check flags against each other, and the files to write.

    Raises:
        typer.BadParameter: Flags contradict each other, or a file cannot be written.
    """
    same = [path for path in request.others if directories.count(path) > 1]
    if same:
        raise console.wrong("MODEL", f"{same[0]} is given twice. Give each model once.")
    models.check_runtime(request.runtime, request.max_memory)
    if request.speed and request.max_memory is not None:
        raise console.wrong(
            "--speed", "a model that is read in parts has the speed of the disk. Leave it out."
        )
    check_prompt(request.prompt)
    of_prompt = set() if request.prompt is None else {"apply_chat_template"}
    check_task_flags(request.tasks, request.given - of_prompt)
    models.check_text(request.dataset, "--dataset")
    if request.output is not None:
        check_page(request.output, request.overwrite)


def _check_vocabulary(described: dict[str, Any], other: dict[str, Any], directory: Path) -> None:
    """Check that two models predict the same tokens.

    Raises:
        typer.BadParameter: They do not.
    """
    sizes = [
        config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
        for config in (described, other)
    ]
    if sizes[0] != sizes[1]:
        raise console.wrong(
            "MODEL",
            f"{directory} predicts {sizes[1]} tokens and the first model {sizes[0]}: they cannot "
            "be compared. Give results of the same model.",
        )


def _check_models(
    request: CompareRequest, directories: list[Path], length: int, device: str
) -> None:
    """Check headers, and that memory has room for each model, before any work."""
    measurement = Measurement(
        source=request.original,
        length=length,
        evaluated=counted_windows(request.limit),
        evaluated_batch=request.batch_size,
        compared=len(directories),
        measures_layers=request.layers,
        keeps_codes=True,
        dtype=request.data_type,
        device=device,
        max_memory=request.max_memory,
        trust_remote_code=request.trust_remote_code,
    )
    for directory in directories:
        models.check_model(directory, request.trust_remote_code, request.check_digests)
        check_measurement(replace(measurement, source=directory))
    remedy = "'quark report' without --dataset measures the errors of its weights."
    check_predicts_text(request.original, "ORIGINAL", remedy, request.trust_remote_code)


def _is_streamed(request: CompareRequest, directories: list[Path], device: str) -> bool:
    """Whether a model is read in parts: as many windows as fit may then differ between models."""
    from quark.torch.export.recognition import exceeds_memory

    sizes = [models.weight_bytes(directory) for directory in directories]
    return request.max_memory is not None or exceeds_memory(max(sizes), device)


def _write(output: Path, numbers: dict[str, Any]) -> None:
    from quark.torch.files import write_json, write_text
    from quark.torch.report.page import comparison_page

    write_text(output, comparison_page(numbers))
    write_json(output.with_suffix(".json"), numbers)
