"""Flags that several verbs share, flags that take several values, and verbs made of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields
from enum import Enum
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from quark.cli.console import set_verbose

SEQ_LEN = 512
EVAL_WINDOWS = 16
GGUF_NAME = "model"
ONNX_NAME = "quark_model.onnx"
TYPED = "COMMANDLINE"  # where the value of a flag comes from, among others

DataType = Literal["auto", "float16", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]

T = TypeVar("T")


class ModelExport(str, Enum):
    """Kind of files that are written."""

    hf_format = "hf_format"
    quark_format = "quark_format"
    gguf = "gguf"
    onnx = "onnx"


def panel(name: str) -> Any:
    """Return what makes options of one panel of the help."""

    def option(*flags: str, **settings: Any) -> Any:
        return typer.Option(*flags, rich_help_panel=name, **settings)

    return option


_model, _evaluation, _other = panel("Model"), panel("Evaluation"), panel("Other")

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
    bool,
    _model(
        "--trust_remote_code/--no_trust_remote_code",
        help="Run Python code that comes with the model.",
        show_default=False,
    ),
]
Tasks = Annotated[
    str | None,
    _evaluation(
        "--tasks",
        metavar="NAME,…",
        help="Tasks of lm-evaluation-harness to score as well, such as gsm8k,wikitext.",
    ),
]
IncludePath = Annotated[
    str | None,
    _evaluation("--include_path", metavar="DIR", help="Directory of task files of your own."),
]
NumFewshot = Annotated[
    int | None,
    _evaluation("--num_fewshot", metavar="N", min=0, help="Examples before each question."),
]
ChatTemplate = Annotated[
    bool,
    _evaluation("--apply_chat_template", help="Put questions of tasks in the model's chat format."),
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


def verb(flags: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """Return a function for typer whose flags are the fields of a dataclass, by their names.

    Args:
        flags: The dataclass. Its field ``given``, which is no flag, receives the names of the flags
            that stand on the command line.
        run: What is called with an instance.
    """

    def command(context: typer.Context, **values: Any) -> None:
        sources = {name: context.get_parameter_source(name) for name in values}
        given = {name for name, source in sources.items() if source and source.name == TYPED}
        run(flags(**values, given=frozenset(given)))  # type: ignore[call-arg]

    hints = get_type_hints(flags, include_extras=True)
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for field in fields(flags):  # type: ignore[arg-type]
        if field.name != "given":
            default = Parameter.empty if field.default is MISSING else field.default
            flag = _named(hints[field.name], field.name)
            parameters.append(
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=flag)
            )
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _named(flag: Any, name: str) -> Any:
    """Return an annotation whose option, if it has no spelling, has that of a name."""
    kind, option = get_args(flag)
    option = copy(option)
    if option.default is ...:
        option.default = f"--{name}"
    return Annotated[kind, option]


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
