"""``quark sample``: text that a model writes itself, to calibrate it with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from quark.cli import console, lengths, models
from quark.cli.collect import find_float_model, load_float_model
from quark.cli.options import SEQ_LEN, Json, add_verb, panel, verb
from quark.cli.outputs import check_file
from quark.cli.predicted_text import predicts_text, read_outline
from quark.cli.quantize.flags import ModelFlags

SUFFIX = ".jsonl"
HELP = """
Let a float model write text, to calibrate it with.

Each sequence begins with a random token and goes on with tokens drawn from
the predictions of the model. So the text has the languages and kinds of text
that the model knows, which a calibration text of one kind lacks. It can be
the only calibration text, or a share of it.

[bold]Example[/bold]

    [cyan]quark sample --model_dir llama --output sampled.jsonl[/cyan]

    [cyan]quark quantize --model_dir llama --output_dir llama-int4 --recipe w4 \\
      --dataset my.txt:0.6,sampled.jsonl:0.4[/cyan]

The model must fit into memory. The same flags give the same text on the same
machine.
"""

_output, _text = panel("Output"), panel("Text")


@dataclass(frozen=True, kw_only=True)
class SampleRequest(ModelFlags):
    """The flags of ``quark sample``; see its help."""

    output: Annotated[
        Path,
        _output(metavar="FILE", help=f"File to write, {SUFFIX}: an object with 'text' a line."),
    ]
    num_samples: Annotated[int, _text(metavar="N", min=1, help="Number of sequences.")] = 64
    seq_len: Annotated[
        int | None,
        _text(
            metavar="N",
            min=2,
            help=f"Tokens of a sequence (default {SEQ_LEN}, or the maximum length of the model if "
            "that is less).",
        ),
    ] = None
    seed: Annotated[
        int, _text(metavar="N", min=0, max=2**32 - 1, help="Seed of the random numbers.")
    ] = 0
    overwrite: Annotated[bool, _output(help="Replace an existing file after success.")] = False
    as_json: Json = False
    given: frozenset[str] = frozenset()


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "sample", verb(SampleRequest, _sample), HELP)


def _sample(request: SampleRequest) -> None:
    from quark.torch.evaluation.sampling import check_writes_text, sample_sequences
    from quark.torch.files import write_text

    if request.output.suffix != SUFFIX:
        raise console.wrong("--output", f"expected a name that ends in {SUFFIX}.")
    check_file("--output", request.output, request.overwrite)
    source = find_float_model(request)
    outline = read_outline(source, request.trust_remote_code)
    if not predicts_text(outline):
        name = type(outline).__name__
        raise console.wrong("--model_dir", f"{name} does not predict the next token of a text.")
    described = models.read_config(source, "--model_dir")
    length = lengths.window_length(described, request.seq_len, SEQ_LEN)
    tokenizer = models.load_tokenizer(source, "--model_dir", request.trust_remote_code)
    model = load_float_model(request, source)
    try:
        check_writes_text(model)
    except (TypeError, ValueError) as error:
        raise console.wrong("--model_dir", str(error)) from None
    with console.stage("sampling text"):
        batches = sample_sequences(model, request.num_samples, length, request.seed)
        texts = [tokenizer.decode(tokens) for batch in batches for tokens in batch]
    records = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
    write_text(request.output, "".join(records))
    if request.as_json:
        facts = {"output": str(request.output), "samples": len(texts), "tokens": length}
        console.as_json(facts)
    else:
        rows = {"sequences": str(len(texts)), "tokens of each": str(length)}
        console.out.print("", console.facts(rows), "")
