"""What ``quark inspect --structure`` shows: what can be rescaled and rotated in a model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark.cli import console, models

if TYPE_CHECKING:
    from quark.torch.graph.structure import ResidualStream, Structure

TOKENS = (2, 32)


def find_structure(directory: Path, trust_remote_code: bool = False) -> Structure:
    """Load a model in float and find its structure with random tokens.

    Args:
        directory: Directory of the model, or its GGUF file.
        trust_remote_code: Whether Python code from the directory may run.

    Raises:
        typer.BadParameter: The model is quantized by a method that is not read.
    """
    import torch

    from quark.torch.graph.discovery import discover
    from quark.torch.quantization.nn.experts import split_experts

    described = models.read_config(directory, "DIR")
    models.check_method(directory, described, "DIR")
    with console.stage("loading the model", spinner=True):
        model: Any = models.load_model(
            directory, trust_remote_code=trust_remote_code, in_float=True
        )
        split_experts(model)
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(size, TOKENS, generator=torch.Generator().manual_seed(0))
    with console.stage("finding its structure", spinner=True):
        return discover(model, ids)


def as_dict(structure: Structure) -> dict[str, Any]:
    """Return a structure as JSON can hold it."""
    stream = structure.stream
    return {
        "blocks": structure.blocks,
        "groups": [
            {
                "kind": group.kind,
                "producer": group.producer,
                "consumers": group.consumers,
                "block": group.block,
                "size": group.size,
                "unreached": group.unreached,
            }
            for group in structure.groups
        ],
        "rejected": [vars(rejected) for rejected in structure.rejected],
        "shared_inputs": structure.shared_inputs,
        "stream": None if stream is None else _stream_facts(stream),
        "value_heads": len(structure.value_heads),
        "down_projections": len(structure.down_projections),
        "obstacle": structure.obstacle,
    }


def show(structure: Structure) -> None:
    """Print a structure, with one line for what all blocks have."""
    groups = Counter(
        (_pattern(g.producer), _names(g.consumers, _pattern(g.producer)), g.size)
        for g in structure.groups
    )
    table = console.table("what can be rescaled")
    for column in ("divided", "multiplied"):
        table.add_column(column)
    for column in ("factors", "times"):
        table.add_column(column, justify="right", no_wrap=True)
    for (producer, consumers, size), times in groups.items():
        table.add_row(escape(producer), escape(consumers), str(size), str(times))
    console.out.print(table)
    reasons = Counter((_pattern(r.producer), _pattern(r.reason)) for r in structure.rejected)
    table = console.table("what cannot")
    table.add_column("output of")
    table.add_column("because it")
    table.add_column("times", justify="right", no_wrap=True)
    for (producer, reason), times in reasons.items():
        table.add_row(escape(producer), escape(reason), str(times))
    console.out.print(table)
    if structure.stream is None:
        console.say(f"The residual stream cannot be rotated: {escape(structure.obstacle)}.")
        facts = {
            "value_heads": len(structure.value_heads),
            "down_projections": len(structure.down_projections),
        }
        console.say('Without it (the option "r1": false of rotation), these can be:')
        console.out.print(console.facts({k.replace("_", " "): str(v) for k, v in facts.items()}))
    else:
        facts = _stream_facts(structure.stream)
        console.say("The residual stream can be rotated:")
        console.out.print(console.facts({k.replace("_", " "): str(v) for k, v in facts.items()}))
    console.out.print()


def _stream_facts(stream: ResidualStream) -> dict[str, Any]:
    parts = ("embeddings", "writers", "biases", "readers", "norms", "down_projections")
    return {
        "size": stream.size,
        "norm_kinds": " and ".join(sorted({norm.kind for norm in stream.norms})) or "none",
        **{part: len(getattr(stream, part)) for part in parts},
        "head": stream.head + (" (tied)" if stream.tied else ""),
        "value_heads": len(stream.value_heads),
    }


def _pattern(text: str) -> str:
    """Write a star for the numbers in names of modules."""
    return re.sub(r"(?<=\.)\d+(?=\.|\b)", "*", text)


def _names(consumers: tuple[str, ...], producer: str) -> str:
    """Join names, those beside the producer without what they share with it."""
    parent = producer.rpartition(".")[0] + "."
    patterns = dict.fromkeys(_pattern(consumer) for consumer in consumers)
    return ", ".join(pattern.removeprefix(parent) for pattern in patterns)
