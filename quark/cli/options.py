"""Flags that several verbs share, and flags that take several values."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from quark.cli.console import set_verbose

SEQ_LEN = 512
EVAL_WINDOWS = 16
GGUF_NAME = "model"


class DataType(str, Enum):
    """Type in which the model is loaded."""

    auto = "auto"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Device(str, Enum):
    """Device on which the model runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ModelExport(str, Enum):
    """Kind of files that are written."""

    hf_format = "hf_format"
    quark_format = "quark_format"
    gguf = "gguf"


class CustomMode(str, Enum):
    """Tool whose layout tensors and configuration have."""

    quark = "quark"
    awq = "awq"
    gptq = "gptq"
    compressed_tensors = "compressed-tensors"
    fp8 = "fp8"


class WeightFormat(str, Enum):
    """What is stored of quantized weights."""

    real_quantized = "real_quantized"
    fake_quantized = "fake_quantized"


class PackMethod(str, Enum):
    """How 4-bit codes lie in a word."""

    reorder = "reorder"
    order = "order"


def panel(name: str) -> Any:
    """Return what makes options of one panel of the help."""

    def option(*flags: str, **settings: Any) -> Any:
        return typer.Option(*flags, rich_help_panel=name, **settings)

    return option


_model, _other = panel("Model"), panel("Other")

DataTypeFlag = Annotated[
    DataType,
    _model(
        "--data_type",
        metavar="TYPE",
        help="Type in which the model is loaded: float16, bfloat16, float32, or that it has.",
    ),
]
DeviceFlag = Annotated[
    Device,
    _model("--device", metavar="DEVICE", help="cpu, cuda, or auto: on a GPU if there is one."),
]
TrustRemoteCode = Annotated[
    bool, _model("--trust_remote_code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, _other("--json", help="Print JSON for programs instead of tables.")]
Verbose = Annotated[
    bool,
    _other(
        "--verbose",
        "-v",
        callback=set_verbose,
        is_eager=True,
        help="Show more on the way, and a traceback if something fails.",
    ),
]


class ManyValues(TyperCommand):
    """A command without arguments, some of whose flags take all values up to the next flag."""

    many: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Write ``--flag a b`` as ``--flag a --flag b``, and ``--flag`` alone as ``--flag ""``."""
        spread: list[str] = []
        pending: list[str] = []  # a flag of many values, and its values so far
        for arg in [*args, "-"]:
            if pending and not arg.startswith("-"):
                pending.append(arg)
                continue
            if pending:
                flag, *values = pending
                spread += [part for value in values or [""] for part in (flag, value)]
                pending = []
            if arg.replace("-", "_").lstrip("_") in self.many:
                pending = [arg]
            else:
                spread.append(arg)
        return super().parse_args(ctx, spread[:-1])
