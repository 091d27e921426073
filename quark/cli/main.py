"""Entry point of the command line ``quark``."""

from __future__ import annotations

import atexit
import gc
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quark import __version__
from quark.cli import (
    collect,
    console,
    convert,
    evaluate,
    merge,
    process_group,
    recipes,
    report,
    sample,
    schemes,
)
from quark.cli.compare import command as compare
from quark.cli.conform import command as conform
from quark.cli.demo import command as demo
from quark.cli.inspect import command as inspect
from quark.cli.other_names import VERBS
from quark.cli.quantize import command as quantize
from quark.cli.search import command as search
from quark.torch.interruption import kept_interrupts

HELP = """
Quantize Hugging Face models, measure the loss, and load the checkpoints anywhere.

[bold]Start here[/bold] (half a minute, no download):

    [cyan]quark demo[/cyan]

[bold]Then with your own model[/bold], a directory from save_pretrained:

    [cyan]quark quantize --model_dir my-model --output_dir my-model-int4 \\
      --quant_scheme int4_wo_128[/cyan]

    [cyan]quark evaluate my-model-int4 --original my-model[/cyan]

    [cyan]quark inspect my-model-int4[/cyan]
"""

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130
FULL_COLLECTION = 100  # collections of younger objects between two of all objects


SERVING = ("chat", "generate", "run", "serve")  # verbs of other software


class Program(TyperGroup):
    """The group of verbs. It turns errors into messages and exit codes."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        """Find a verb; those of other tools are answered with what does their work."""
        if args and args[0] in SERVING:
            raise typer.BadParameter(
                f"quark has no verb '{args[0]}': other software serves its checkpoints. For "
                "example: vllm serve DIR; docs/serve.md has llama.cpp, ONNX Runtime and more. "
                "'quark compare ORIGINAL DIR' shows what models answer."
            )
        if args and args[0] in VERBS:
            raise typer.BadParameter(f"quark has no verb '{args[0]}': give quark {VERBS[args[0]]}.")
        if args and args[0] == context.info_name:
            raise typer.BadParameter(f"Give 'quark' once: {shlex.join(args)}")
        if args and args[0] not in self.commands and Path(args[0]).exists():
            raise typer.BadParameter(
                f"{args[0]} is a path. Give a verb before it: quark inspect {shlex.quote(args[0])}"
            )
        if args and args[0] not in self.commands and not get_close_matches(args[0], self.commands):
            verbs = ", ".join(self.commands)
            raise typer.BadParameter(f"quark has no verb {args[0]!r}. Verbs: {verbs}.")
        return super().resolve_command(context, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, **options: Any) -> Any:
        """Run a verb and exit: 0 done, 1 failed, 2 wrong call, 130 interrupted."""
        with console.session(), kept_interrupts():
            code = self._run(args, options)
        sys.exit(code)

    def _run(self, args: Sequence[str] | None, options: dict[str, Any]) -> int:
        options |= {"prog_name": "quark", "standalone_mode": False}
        try:
            code = super().main(args, **options)
        except (KeyboardInterrupt, typer.Abort):
            code = EXIT_INTERRUPTED
        except Exception as error:
            return console.report(error) if process_group.tells_errors() else EXIT_FAILURE
        if code == EXIT_INTERRUPTED and process_group.rank() == 0:
            console.err.print("Interrupted. No incomplete files are left.")
        return code if isinstance(code, int) else 0


ALIASES = {
    "kv_cache_quant_scheme": "kv_cache_dtype",
    "attention_dtype": "attention_scheme",
    "quant_algo_config_file_path": "quant_algo_config_file",
    "pre_optimization_config_file_path": "quant_algo_config_file",
    "evaluation_dataset": "eval_data",
    "eval_data_dir": "eval_data",
}


def normalize(name: str) -> str:
    """Return the canonical name of a flag: ``model_dir`` for ``model-dir``."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


app = typer.Typer(
    cls=Program,
    help=HELP,
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": normalize,
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quark {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
]


@app.callback()
def _program(context: typer.Context, version: Version = False) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif process_group.is_distributed() and context.invoked_subcommand != "quantize":
        raise typer.BadParameter(
            f"'quark {context.invoked_subcommand}' runs in one process. Start it without torchrun."
        )


for command in (
    demo,
    quantize,
    sample,
    collect,
    merge,
    search,
    convert,
    evaluate,
    compare,
    conform,
    inspect,
    report,
    schemes,
    recipes,
):
    command.register(app)


def main(
    args: Sequence[str] | None = None, defaults: dict[str, dict[str, Any]] | None = None
) -> None:
    """Run the command line.

    Args:
        args: Verb and flags; None for the arguments of the process.
        defaults: Verb -> flag -> default value, instead of the default in the help.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # replace characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    _collect_seldom()
    app(args=args, default_map=defaults)


def _collect_seldom() -> None:
    """Let full collections of garbage be rare in this process.

    Imports make a million objects that stay. Going through all of them six times, and once more at
    the end to free them, takes a fifth of the time of the imports. Young objects are collected as
    often as before.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, FULL_COLLECTION))
    atexit.register(_keep_objects)


def _keep_objects() -> None:
    """Leave all objects to the operating system, unless a package would report them as leaks.

    Extension modules made with nanobind, as that of Triton, print every object that is left.
    """
    if not any(_is_of_nanobind(module) for module in list(sys.modules.values())):
        gc.freeze()


def _is_of_nanobind(module: Any) -> bool:
    if not str(getattr(module, "__file__", None)).endswith((".so", ".pyd")):
        return False
    return any(type(value).__module__ == "nanobind" for value in vars(module).values())


if __name__ == "__main__":
    main()
