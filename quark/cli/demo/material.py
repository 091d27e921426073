"""The model and the text that all schemes of a demonstration share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli import console, models
from quark.cli.options import SEQ_LEN
from quark.cli.prompts import read_prompt

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.report.continuation import Prompt

ORIGINAL = "original"
WINDOWS = 8  # windows of text, for calibration and for evaluation
TIMED_TOKENS = 8
REPETITION_PENALTY = 1.15  # small models repeat themselves without it


@dataclass(frozen=True)
class Demonstration:
    """What a demonstration shows.

    Attributes:
        schemes: Schemes to compare.
        exported: Scheme whose result is exported.
        prompt: Text that the models continue, or a question.
        is_question: Whether the prompt is a question for a chat.
        new_tokens: Maximum length of the answer.
        hint: What else a reader should know of the losses.
        dtype: Type that the model is loaded in, ``auto`` for the stored one.
        is_timed: Whether the speed of each result is measured.
    """

    schemes: Sequence[str]
    exported: str
    prompt: str
    is_question: bool
    new_tokens: int
    hint: str
    dtype: str
    is_timed: bool


SHIPPED = Demonstration(
    (
        *("fp8", "ptpc_fp8", "int8", "ptpc_int8", "int4_wo_32", "int4_wo_128"),
        *("uint4_wo_128", "int3_wo_128", "int2_wo_32"),
    ),
    "uint4_wo_128",
    "Raise an exception if",
    False,
    24,
    "A model trained on more text may lose more, which --real shows.",
    "auto",
    False,
)
REAL = Demonstration(
    ("ptpc_fp8", "ptpc_int8", "uint4_wo_32", "int4_wo_64", "mxfp4"),
    "uint4_wo_32",
    "What is the capital of France? Answer in one sentence.",
    True,
    32,
    "Algorithms such as --quant_algo gptq win back most of the loss.",
    "bfloat16",  # its file is a quantized one
    True,
)


@dataclass(frozen=True)
class Material:
    """The model and the text that all schemes share."""

    model: nn.Module
    tokenizer: Any
    calibration: list[torch.Tensor]
    evaluation: torch.Tensor
    prompt: Prompt

    def answer(self, model: nn.Module) -> str:
        """Return the answer of a model to the prompt, in one line."""
        return " ".join(self.prompt.answer(model).text.split())

    def speed(self, model: nn.Module) -> float:
        """Return the tokens per second of a model that answers, one token at a time."""
        replace(self.prompt, new_tokens=2).answer(model)  # what happens once is not measured
        measured = replace(self.prompt, new_tokens=TIMED_TOKENS).answer(model).tokens_per_second
        assert measured is not None
        return measured

    def logits(self, model: nn.Module) -> torch.Tensor:
        """Return the logits of a model for the first window of text, (1, length, vocabulary)."""
        import torch

        with torch.inference_mode():
            result: torch.Tensor = model(self.evaluation[:1]).logits
        return result


def shipped_model() -> Path:
    """Return the directory of the model of this package."""
    from quark.demo.text import model_directory

    return model_directory()


def real_model() -> Path:
    """Return the file of the real model.

    Raises:
        typer.BadParameter: Its package, or the one that reads its file, is not installed.
    """
    from quark.demo.real import real_model_file
    from quark.torch.export.gguf.architectures import import_gguf

    try:
        import_gguf()
        return real_model_file()
    except (FileNotFoundError, ImportError) as error:
        raise console.wrong("--real", f"{str(error).removesuffix('.')}.") from None


def load_material(source: Path, shown: Demonstration) -> Material:
    """Return the model of a directory or file, and its text."""
    tokenizer = models.load_tokenizer(source, "model")
    text = [
        models.text_windows(None, "text", tokenizer, SEQ_LEN, WINDOWS, held_out)
        for held_out in (False, True)
    ]
    prompt = read_prompt(shown.prompt, shown.new_tokens, tokenizer, text[1], shown.is_question)
    assert prompt is not None
    return Material(
        model=models.load_model(source, shown.dtype, in_float=True),
        tokenizer=tokenizer,
        calibration=[text[0]],
        evaluation=text[1],
        prompt=replace(prompt, repetition_penalty=REPETITION_PENALTY),
    )
