"""Flags that several verbs share, flags with several values, and verbs built from a dataclass.

typer makes flags of the parameters of a function, with one value for each mention. The verb
quantize has dozens of flags in one dataclass, and flags of the documented script take all values up
to the next flag.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from quark.cli.console import first_example, open_log_file, set_quiet, set_verbose, wrong
from quark.cli.other_names import MEANT_TYPES

logger = logging.getLogger(__name__)

SEQ_LEN = 512
EVAL_WINDOWS = 16
ARGUMENT = "argument"  # kind of a parameter that is no flag
TYPED = "COMMANDLINE"  # source of a value that is given on the command line

DATA_TYPES = ("auto", "float16", "bfloat16", "float32")

T = TypeVar("T")


def counted_windows(limit: int) -> int:
    """Return how many windows an estimate of memory counts: all of a text count as the default."""
    return limit if limit > 0 else EVAL_WINDOWS


def one_of(
    flag: str,
    names: Callable[[], Iterable[str]],
    elsewhere: Mapping[str, Iterable[str]] | None = None,
    meant: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return settings for typer of a flag whose value is a name in a table: parser, completion.

    Args:
        flag: The flag, for messages.
        names: Function that returns the names. Case is ignored, and "-" equals "_".
        elsewhere: Other flag -> names that it takes, to which a message refers.
        meant: Name that other tools use -> what to type, to which a message refers.
    """

    def parse(value: str) -> str:
        from quark.torch.quantization.config.name_lookup import unknown

        known = {_plain(name): name for name in names()}
        for other, others in (elsewhere or {}).items():
            if _plain(value) in map(_plain, others) and _plain(value) not in known:
                raise wrong(flag, f"{value!r} is a value of {other}: give {other} {value}.")
        if _plain(value) in (meant or {}):
            raise wrong(flag, f"{value!r} is unknown. Give {(meant or {})[_plain(value)]}.")
        if _plain(value) not in known:
            message = unknown(value, known.values(), flag).removeprefix(f"{flag}: ")
            raise wrong(flag, message)
        return known[_plain(value)]

    return {"parser": parse, "autocompletion": complete(names)}


def complete(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion for typer of values that are names, one or several with commas.

    ``awq,gp`` is completed to ``awq,gptq``.

    Args:
        names: Function that returns the names.
    """

    def completion(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return completion


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def in_words(names: Iterable[str]) -> str:
    """Return a list of names for a sentence: ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(given: Any) -> int:
    """Return a number of bytes: ``500MB``, ``1.5GiB``, ``8g`` or a plain number.

    Raises:
        typer.BadParameter: It is none; the command line names the flag.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(given).strip().lower())
    unit = (_UNITS | _BINARY).get(match[2]) if match else None
    if match is None or unit is None or not float(match[1]):
        raise typer.BadParameter(f"expected a size such as 8GB or 500MiB, got {given!r}.")
    return int(float(match[1]) * unit)


def panel(name: str) -> Any:
    """Return a function that makes options in one panel of the help."""

    def option(*flags: str, **settings: Any) -> Any:
        return typer.Option(*flags, rich_help_panel=name, **settings)

    return option


_model, _evaluation, _other = panel("Model"), panel("Evaluation"), panel("Other")

DataTypeFlag = Annotated[
    str,
    _model(
        "--data_type",
        metavar="TYPE",
        **one_of("--data_type", lambda: DATA_TYPES, meant=MEANT_TYPES),
        help="Data type of the loaded model: float16, bfloat16, float32, or auto (as stored).",
    ),
]
DeviceFlag = Annotated[
    str,
    _model(
        "--device",
        metavar="DEVICE",
        help="cpu, a device of torch such as cuda or cuda:1, or auto (a GPU if available). "
        "'quark quantize' also takes GPUs that share the work: cuda:0,cuda:1, or all.",
    ),
]
MaxMemory = Annotated[
    int | None,
    _model(
        "--max_memory",
        metavar="SIZE",
        parser=parse_size,
        help="Memory that the command may take, such as 8GB: tensors of the model are then read "
        "when they are used. Results are the same. Default: only if the model does not fit.",
    ),
]
Runtime = Annotated[
    str,
    _model(
        "--runtime",
        metavar="NAME",
        help="How quantized layers compute: exact (default), auto, fast, compiled or unpacked.",
    ),
]
PlanOnly = Annotated[
    bool,
    _model(
        "--plan",
        help="Print what the run will take (memory, disk, time) and what will be quantized how, "
        "from the headers of the files alone, and stop. The exit code is 1 if this machine has "
        "too little.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    _model(
        "--trust_remote_code/--no_trust_remote_code",
        help="Run Python code from the model directory.",
        show_default=False,
    ),
]
AllExperts = Annotated[
    bool,
    panel("Algorithms")(
        "--moe_calibrate_all_experts",
        help="Calibrate each expert of a mixture on all tokens, not on those that the router "
        "sends to it. What the model computes meanwhile is unchanged.",
    ),
]
CheckDigests = Annotated[
    bool,
    _model(
        "--check_digests",
        help="First compare the files that are read (model, statistics, parameters) with the "
        "digests that were written with them.",
    ),
]
Tasks = Annotated[
    str | None,
    _evaluation(
        "--tasks",
        metavar="NAME,…",
        help="Tasks of lm-evaluation-harness to evaluate too, such as gsm8k,wikitext.",
    ),
]
IncludePath = Annotated[
    str | None,
    _evaluation("--include_path", metavar="DIR", help="Directory of your own task files."),
]
NumFewshot = Annotated[
    int | None,
    _evaluation("--num_fewshot", metavar="N", min=0, help="Few-shot examples per question."),
]
ChatTemplate = Annotated[
    bool,
    _evaluation(
        "--apply_chat_template", help="Apply the chat template of the model to the questions."
    ),
]
_TASK_FLAGS = {"include_path", "num_fewshot", "task_limit", "apply_chat_template"}
Json = Annotated[bool, _other("--json", help="Print JSON instead of tables.")]


def check_task_flags(tasks: str | None, given: Iterable[str]) -> None:
    """Refuse flags of tasks where there are none.

    Args:
        tasks: Names of the tasks, or None.
        given: Names of the flags that are given, of any kind.

    Raises:
        typer.BadParameter: One has no effect.
    """
    idle = [name for name in given if name in _TASK_FLAGS]
    if idle and not tasks:
        raise wrong(f"--{min(idle)}", "needs --tasks.")


def _shared_flag(
    kind: Any, name: str, act: Callable[[Any], None], *names: str, **settings: Any
) -> Parameter:
    """Return a parameter whose value is not passed on: ``act`` takes it before any other flag."""
    flag = _other(f"--{name}", *names, callback=act, is_eager=True, **settings)
    default = False if kind is bool else None
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag]
    )


_SHARED_FLAGS = (
    _shared_flag(
        bool, "verbose", set_verbose, "-v", help="Show the log, and a traceback on errors."
    ),
    _shared_flag(
        bool,
        "quiet",
        set_quiet,
        "-q",
        help="Print warnings and errors only; with --json, the JSON too.",
    ),
    _shared_flag(
        Path | None,
        "log_file",
        open_log_file,
        metavar="FILE",
        help="File to write the log to: steps with their times, progress, warnings and errors.",
    ),
)


def add_verb(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    help: str,
    cls: type[Verb] | None = None,
) -> None:
    """Add a verb to the command line, with the flags that every verb has.

    Args:
        app: The command line.
        name: Name of the verb.
        function: What it does; its parameters are the other flags.
        help: Text of its help.
        cls: Class of the command; by default ``Verb``.
    """
    signature = inspect.signature(function, eval_str=True)

    def command(**values: Any) -> None:
        function(**{name: values[name] for name in signature.parameters})

    own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in signature.parameters.values()]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*own, *_SHARED_FLAGS]
    )
    app.command(name, cls=cls or Verb, help=help)(command)


def verb(flags: type[T], run: Callable[[T], None]) -> Callable[..., None]:
    """Return a function for typer whose flags are the fields of a dataclass.

    Args:
        flags: The dataclass. Its field ``given`` is not a flag: it receives the names of the flags
            on the command line.
        run: Function to call with an instance of the dataclass.
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
    """Return an annotation whose option is spelled like a field, unless it has a spelling."""
    kind, option = get_args(flag)
    option = copy(option)
    if isinstance(option, OptionInfo) and option.default is ...:
        option.default = f"--{name}"
    return Annotated[kind, option]


class Verb(TyperCommand):
    """A command that says what to type for words that belong to no flag, or to a flag in vain.

    Attributes:
        many: Names of flags that take all values up to the next flag, or none.
    """

    many: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words; those that are left over are refused with what to type instead.

        So is an empty value: that of a variable of the shell that is not set would else mean
        another path or the default. A flag with one value that is given twice warns.
        """
        ctx.allow_extra_args = True
        if not ctx.resilient_parsing:
            self._check_values(ctx, [*args])
        extra = super().parse_args(ctx, [*args])
        if not extra or ctx.resilient_parsing:
            return extra
        before = args[args.index(extra[0]) - 1]
        if extra[0].lower() in ("true", "false") and before.startswith("-"):
            is_on = extra[0].lower() == "true"
            out = repr(extra[0]) if is_on else f"'{before} {extra[0]}'"
            ctx.fail(f"{before} is given without a value. Leave {out} out.")
        ctx.fail(f"Unexpected argument {' '.join(extra)!r}.{first_example(self.help or '')}")

    def _check_values(self, ctx: Any, args: list[str]) -> None:
        values, _, order = self.make_parser(ctx).parse_args(args)
        for parameter in dict.fromkeys(order):
            value, flag = values.get(parameter.name), parameter.opts[0]
            name = flag if flag.startswith("-") else parameter.metavar
            is_list = isinstance(value, (list, tuple))
            parts: Any = value if is_list else [value]
            if "" in parts and parameter.name not in self.many:
                ctx.fail(f"{name} is empty. Give a value, or leave it out.")
            is_switch = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
            if order.count(parameter) > 1 and not is_list and not is_switch:
                count = order.count(parameter)
                logger.warning("%s is given %d times: the last value counts.", name, count)


class ManyValues(Verb):
    """A command whose flags in ``many`` take all values up to the next flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Write ``--flag a b`` as ``--flag a --flag b``, and ``--flag`` alone as ``--flag ""``."""
        spread: list[str] = []
        pending: list[str] = []  # a flag with many values, and its values so far
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
