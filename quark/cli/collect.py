"""``quark collect``: calibration statistics of a float model, for any number of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quark.cli import accelerators, console, lengths, models
from quark.cli.coverage import Coverage, letters_of
from quark.cli.memory_check import Measurement, check_measurement
from quark.cli.model_files import find_model
from quark.cli.options import SEQ_LEN, Json, add_verb, panel, verb
from quark.cli.outputs import check_directory, check_offload_directory, check_room
from quark.cli.predicted_text import check_reads_text
from quark.cli.quantize.flags import CalibrationFlags, ModelFlags

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.pipeline.statistics import Statistics

HELP = """
Collect calibration statistics once; reuse them for any number of runs.

Without running data again, [cyan]quark quantize --statistics[/cyan] applies AWQ or GPTQ in
any format and computes static ranges of activations, and [cyan]quark search
--statistics[/cyan] chooses formats for any size. Statistics are valid for one model
in one type; other weights are an error.

[bold]Example[/bold]

    [cyan]quark collect --model_dir llama --output_dir llama-statistics --dataset my.txt[/cyan]

    [cyan]quark quantize --model_dir llama --output_dir llama-int3 --quant_scheme int3_wo_128 \\
      --quant_algo gptq --statistics llama-statistics[/cyan]

Several processes or machines can each collect the statistics of a part of the
data; [cyan]quark merge[/cyan] merges them. Statistics take 4 bytes for each pair of inputs
of a layer (up to twice the size of the model in 16 bits), and about a
kilobyte for each input.
"""

_output, _data = panel("Output"), panel("Calibration")


@dataclass(frozen=True, kw_only=True)
class DataFlags(CalibrationFlags, ModelFlags):
    """Flags of a model and its calibration text."""


@dataclass(frozen=True, kw_only=True)
class CollectRequest(DataFlags):
    """The flags of ``quark collect``; see its help."""

    output_dir: Annotated[Path, _output(metavar="DIR", help="Directory to write.")]
    probes: Annotated[
        int,
        _data(
            metavar="N",
            min=0,
            help="Number of times 128 tokens on which the sensitivity of each layer is measured, "
            "by rounding it alone (0 = none, which saves time; only 'quark search' needs "
            "them).",
        ),
    ] = 1
    overwrite: Annotated[bool, _output(help="Replace an existing directory after success.")] = False
    as_json: Json = False
    given: frozenset[str] = frozenset()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "collect", verb(CollectRequest, _collect), HELP)


def _collect(request: CollectRequest) -> None:
    check_directory("--output_dir", request.output_dir, request.overwrite)
    if request.offload_dir is not None:
        check_offload_directory(request.offload_dir)
    source = find_float_model(request)
    check_reads_text(source, "--model_dir", request.trust_remote_code)
    check_measurement(describe_collection(request, source, request.probes))
    windows = read_windows(request, source)
    tokenizer = models.load_tokenizer(source, "--model_dir", request.trust_remote_code)
    letters = letters_of(tokenizer, [windows])
    model = load_float_model(request, source)
    check_size = partial(check_room, "--output_dir", request.output_dir)
    statistics = collect(model, windows, request, request.probes, check_size)
    statistics = replace(statistics, letters=letters)
    write_statistics(statistics, request.output_dir, request.overwrite, request.as_json)


def write_statistics(
    statistics: Statistics, directory: Path, overwrite: bool, as_json: bool
) -> None:
    """Write statistics, and print their size and the scripts of their text if they are known."""
    from quark.torch.evaluation.scripts import shares_of
    from quark.torch.statistics.files import save_statistics

    with console.stage("writing statistics"):
        save_statistics(statistics, directory, overwrite)
    size = sum(file.stat().st_size for file in directory.iterdir())
    coverage = Coverage(shares_of(statistics.letters))
    rows = {
        "layers": str(len(statistics.readers)),
        "tensors": str(len(statistics.inputs)),
        "size on disk": console.format_bytes(size),
        **coverage.rows(),
    }
    if as_json:
        counts = {"layers": len(statistics.readers), "tensors": len(statistics.inputs)}
        shares = {"calibration_scripts": coverage.calibration}
        console.as_json({"output": str(directory), **counts, "bytes": size, **shares})
    else:
        console.out.print("", console.facts(rows), "")


def find_float_model(request: ModelFlags) -> Path:
    """Return the directory of the model; a quantized one is going to be dequantized.

    Raises:
        typer.BadParameter: There is no such directory, the model is quantized by a method that is
            not read, or there is no GPU.
        ValueError: Its tensors do not fit it, or a file has changed.
    """
    directory = find_model(request.model_dir, "--model_dir", request.revision)
    described = models.read_config(directory, "--model_dir")
    models.describe_source(directory, described, "--model_dir")
    accelerators.pick_device(request.device)
    models.check_model(directory, request.trust_remote_code, request.check_digests)
    return directory


def describe_collection(request: DataFlags, source: Path, probes: int) -> Measurement:
    """Return the work of a collection of statistics, to estimate its memory.

    Args:
        request: Flags of calibration and model.
        source: Directory of the model.
        probes: Number of pieces of the data on which sensitivities are measured.
    """
    described = models.read_config(source, "--model_dir")
    return Measurement(
        source=source,
        length=lengths.window_length(described, request.seq_len, SEQ_LEN),
        collected=request.num_calib_data,
        probes=probes,
        dtype=request.data_type,
        device=accelerators.pick_device(request.device),
        max_memory=request.max_memory,
        trust_remote_code=request.trust_remote_code,
        offload_dir=request.offload_dir,
    )


def load_float_model(request: ModelFlags, directory: Path) -> nn.Module:
    """Load the model of a directory in float."""
    device = accelerators.pick_device(request.device)
    with console.stage("loading the model", spinner=True):
        return models.load_model(
            directory,
            request.data_type,
            device,
            request.trust_remote_code,
            request.model_attn_implementation,
            request.max_memory,
            in_float=True,
        )


def read_windows(request: DataFlags, directory: Path, held_out: bool = False) -> torch.Tensor:
    """Return windows of the calibration text, (windows, length).

    Args:
        request: Flags of calibration and model.
        directory: Directory of the model.
        held_out: Whether to read the held-out part of a named or default text.
    """
    described = models.read_config(directory, "--model_dir")
    length = lengths.window_length(described, request.seq_len, SEQ_LEN)
    flag = "--eval_data" if held_out else "--dataset"
    with console.stage("reading text"):
        tokenizer = models.load_tokenizer(directory, "--model_dir", request.trust_remote_code)
        return models.text_windows(
            request.dataset, flag, tokenizer, length, request.num_calib_data, held_out
        )


def collect(
    model: nn.Module,
    windows: torch.Tensor,
    request: CalibrationFlags,
    probes: int,
    check_size: Callable[[int], None] | None = None,
) -> Statistics:
    """Return statistics of a model on windows of text; see ``collect_statistics``."""
    import torch

    from quark.torch.evaluation.samples import complete_batches
    from quark.torch.statistics.collection import collect_statistics

    with console.stage("collecting statistics"):
        batches = complete_batches(model, torch.split(windows, request.batch_size))
        return collect_statistics(model, batches, probes, request.offload_dir, check_size)


def read_optional_statistics(directory: Path | None, digests: bool) -> Statistics | None:
    """Return the statistics in the directory of ``--statistics``, or None without a directory.

    Args:
        directory: The directory, or None.
        digests: As in ``read_statistics``.

    Raises:
        typer.BadParameter: As in ``read_statistics``.
    """
    return None if directory is None else read_statistics(directory, "--statistics", digests)


def read_statistics(directory: Path, flag: str, digests: bool = False) -> Statistics:
    """Return the statistics in a directory.

    Args:
        directory: The directory.
        flag: The flag that gave the directory, for messages.
        digests: Whether to compare the files with their digests.

    Raises:
        typer.BadParameter: The directory holds no statistics, or they have changed, are damaged,
            or have no digests that were asked for.
    """
    from quark.torch.statistics.files import load_statistics

    try:
        return load_statistics(directory, digests)
    except FileNotFoundError as error:
        raise console.wrong(flag, f"{error} Give a directory that 'quark collect' wrote.") from None
    except (OSError, ValueError) as error:
        raise console.wrong(flag, str(error)) from None
