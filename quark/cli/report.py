"""``quark report``: measurements of a checkpoint, layer by layer, as a page and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from quark.cli import accelerators, console, lengths, models
from quark.cli.collect import read_statistics
from quark.cli.coverage import scripts_of
from quark.cli.evaluate import BatchSize, Limit, Original, SeqLen
from quark.cli.memory_check import Measurement, check_measurement
from quark.cli.model_files import check_quantized, find_container, find_model
from quark.cli.options import (
    EVAL_WINDOWS,
    SEQ_LEN,
    CheckDigests,
    DeviceFlag,
    Json,
    MaxMemory,
    TrustRemoteCode,
    add_verb,
    counted_windows,
    panel,
)
from quark.cli.originals import check_original
from quark.cli.outputs import check_page
from quark.cli.predicted_text import check_predicts_text
from quark.cli.prompts import NEW_TOKENS, NewTokens, PromptText, check_prompt, read_prompt

if TYPE_CHECKING:
    import torch

    from quark.torch.pipeline.statistics import Statistics
    from quark.torch.report.continuation import Prompt
    from quark.torch.report.unseen_inputs import Decode

HELP = """
Report the effect of quantization on each layer, as an HTML page and as JSON.

The report has the errors, outliers, scales and sizes of layers, the layers
that stay in float with the reason, and the worst layers with suggestions. The
page needs no network. With [cyan]--original[/cyan], the report has the errors of weights;
with [cyan]--dataset[/cyan], measurements of activations; with both, the errors of outputs
and predictions.

[bold]Examples[/bold]

    [cyan]quark report my-model-int4 --original my-model --dataset wikitext[/cyan]

    [cyan]quark report my-model-int4 --json > numbers.json[/cyan]
"""

_output, _text = panel("Output"), panel("Text")
Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of the checkpoint, a GGUF file, or OWNER/NAME."),
]
Dataset = Annotated[
    str | None,
    _text(
        "--dataset",
        metavar="FILE|NAME",
        help="Text to run the models with: a .txt, .md, .jsonl, .json, .csv or .parquet file, a "
        "directory, wikitext, pileval, cnn_dailymail, or another dataset of the Hub.",
    ),
]
StatisticsFlag = Annotated[
    Path | None,
    _text(
        "--statistics",
        metavar="DIR",
        help="Statistics of the original from 'quark collect': the report then shows inputs that "
        "the calibration text hardly had.",
    ),
]
Output = Annotated[
    Path,
    _output(
        "--output",
        metavar="FILE",
        help="Page to write; the numbers go to the same name with .json.",
    ),
]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace existing files.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "report", report, HELP)


def report(
    directory: Directory,
    original: Original = None,
    dataset: Dataset = None,
    seq_len: SeqLen = None,
    limit: Limit = EVAL_WINDOWS,
    batch_size: BatchSize = 8,
    statistics: StatisticsFlag = None,
    prompt: PromptText = None,
    new_tokens: NewTokens = NEW_TOKENS,
    output: Output = Path("report.html"),
    overwrite: Overwrite = False,
    device: DeviceFlag = "auto",
    max_memory: MaxMemory = None,
    trust_remote_code: TrustRemoteCode = False,
    check_digests: CheckDigests = False,
    as_json: Json = False,
) -> None:
    """Measure a checkpoint, and write the page or print the numbers."""
    if not as_json:
        check_page(output, overwrite)
    check_prompt(prompt)
    models.check_text(dataset, "--dataset")
    if prompt is not None and dataset is None:
        raise console.wrong("--prompt", "models run with --dataset only. Give a text, too.")
    if statistics is not None and (original is None or dataset is None):
        raise console.wrong("--statistics", "it needs --original and --dataset: give both.")
    collected = None if statistics is None else read_statistics(statistics, "--statistics")
    place: Any = {"device": accelerators.pick_device(device)}
    place |= {"trust_remote_code": trust_remote_code, "max_memory": max_memory}
    directory, original = _find_models(directory, original)
    check_quantized(directory, "DIR")  # first: a float file asks for another call, whole or not
    models.check_model(directory, trust_remote_code, check_digests)
    if original is not None:
        models.check_model(original, trust_remote_code)
    if dataset is not None:
        remedy = "Leave --dataset out: the report has the errors of weights then."
        check_predicts_text(directory, "--dataset", remedy, trust_remote_code)
    work = Measurement(source=directory, length=seq_len or SEQ_LEN, keeps_codes=True, **place)
    if dataset is not None:
        work = replace(work, evaluated=counted_windows(limit), evaluated_batch=batch_size)
        work = replace(work, compared=1 + (original is not None), samples_inputs=True)
    _check_memory(replace(work, measures_layers=True), original)
    text = _Text(None, None, None)
    if dataset is not None:
        source, flag = (directory, "DIR") if original is None else (original, "--original")
        length = lengths.window_length(models.read_config(source, flag), seq_len, SEQ_LEN)
        with console.stage("reading text"):
            tokenizer = models.load_tokenizer(source, flag, trust_remote_code)
            windows = models.text_windows(dataset, "--dataset", tokenizer, length, limit, True)
            asked = read_prompt(prompt, new_tokens, tokenizer, windows)
        text = _Text(windows, tokenizer.decode, asked, scripts_of(tokenizer, [windows]))
    numbers = _measure(directory, original, dataset or "", text, collected, batch_size, place)
    if as_json:
        console.as_json(numbers)
    else:
        _write(numbers, output)
        _print_summary(numbers, output)


class _Text(NamedTuple):
    """The text that the models run on; all fields are None if there is none.

    Attributes:
        windows: Token identifiers, (windows, length).
        decode: Returns the text of tokens.
        prompt: Text that the models continue; None for none.
        scripts: Script to its share of the letters.
    """

    windows: torch.Tensor | None
    decode: Decode | None
    prompt: Prompt | None
    scripts: Mapping[str, float] = MappingProxyType({})


def _measure(
    directory: Path,
    original: Path | None,
    source: str,
    text: _Text,
    statistics: Statistics | None,
    batch_size: int,
    place: dict[str, Any],
) -> dict[str, Any]:
    """Return the numbers of a report."""
    from quark.torch.report.measurement import measure
    from quark.torch.report.unseen_inputs import CalibrationText

    calibration = None
    if statistics is not None:
        calibration = CalibrationText(statistics, text.decode)
    with console.stage("measuring layers"):
        report = measure(
            directory,
            original,
            text.windows,
            source,
            batch_size,
            calibration=calibration,
            prompt=text.prompt,
            **place,
        )
    return report.with_scripts(text.scripts).to_dict()


def _find_models(directory: Path, original: Path | None) -> tuple[Path, Path | None]:
    """Return where both models are; models on the Hub are downloaded.

    Raises:
        typer.BadParameter: One of them is nowhere.
    """
    directory = find_model(directory, "DIR")
    if not directory.exists():
        raise console.wrong("DIR", f"there is no {directory}. Give a checkpoint's directory.")
    find_container(directory, "DIR")
    if original is not None:
        original = find_model(original, "--original")
        check_original(directory, original, "DIR")
    return directory, original


def _check_memory(measurement: Measurement, original: Path | None) -> None:
    """Check that there is room for the checkpoint, and for the original if it runs on text."""
    check_measurement(measurement)
    if original is not None and measurement.evaluated:
        check_measurement(replace(measurement, source=original, keeps_codes=False))


def _write(numbers: dict[str, Any], output: Path) -> None:
    """Write the page, and the numbers beside it."""
    from quark.torch.files import write_json, write_text
    from quark.torch.report.page import page

    write_text(output, page(numbers))
    write_json(output.with_suffix(".json"), numbers)


def _print_summary(numbers: dict[str, Any], output: Path) -> None:
    """Print the summary, the worst layers, advice and continuations."""
    console.out.print()
    for sentence in numbers["verdict"]:
        console.say(sentence)
    console.out.print()
    if numbers["worst"]:
        table = console.table("Worst layers")
        table.add_column("layer", overflow="fold")
        table.add_column(numbers["worst"][0]["measure"], justify="right", no_wrap=True)
        for row in numbers["worst"]:
            is_ratio = row["measure"] == "outliers"
            value = f"{row['value']:.1f} × rms" if is_ratio else f"{row['value']:.2%}"
            table.add_row(escape(row["name"]), value)
        console.out.print(table)
    _print_advice(numbers)
    if numbers["continuations"]:
        console.say(f"Continuations of: {escape(numbers['prompt'])}\n")
        written = numbers["continuations"].items()
        rows = {name: escape(" ".join(row["text"].split())) for name, row in written}
        console.out.print(console.facts(rows), "", sep="\n")
    file = escape(str(output.with_suffix(".json")))
    console.say(f"Page: {escape(str(output))}   Numbers: {file}")
    console.out.print()


def _print_advice(numbers: dict[str, Any]) -> None:
    if numbers["advice"]:
        console.say("To lose less, quantize the original again with one or more of these:\n")
    for number, remedy in enumerate(numbers["advice"], 1):
        console.say(f"{number}. {escape(remedy['text'])}")
        console.show_code(remedy["flags"])
    console.out.print()
