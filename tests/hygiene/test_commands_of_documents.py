"""Commands in the documents are accepted: verbs, flags and values exist. Nothing is run."""

import ast
import re
import shlex

import pytest
import typer

from quark.cli.main import ALIASES, app
from quark.torch.quantization.config.algo_lookup import make_algo_configs
from quark.torch.quantization.config.presets import scheme

BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(quark [a-z]+ [^`]*--[^`]*)`")
FOREIGN = ("…", "...", "|", "$(", "<")  # what is left out, or another program
START = re.compile(r"^(?:torchrun (?:--\S+ \S+ )*-m )?quark ")
VALUE = re.compile(r"--(quant_scheme|quant_algo|pre_quantization_optimization) ([\w,]+)")
MADE_UP = {"my_scheme"}
UsageError = typer.BadParameter.__base__  # typer has no name for it


def commands(text):
    """Argument lists of the commands in the blocks of a document."""
    lines = [
        line for block in BLOCK.findall(text) for line in block.replace("\\\n", " ").split("\n")
    ]
    for line in lines:
        if START.match(line) and not any(sign in line for sign in FOREIGN):
            command = line.split(" > ")[0]
            yield shlex.split(START.sub("", command), comments=True)


def unknown_flags(text):
    """Verbs and flags of the commands within sentences that do not exist."""
    program = typer.main.get_command(app)
    for _, name, rest in (span.split(" ", 2) for span in INLINE.findall(" ".join(text.split()))):
        if name not in program.commands:
            yield name
            continue
        with typer.Context(program.commands[name]) as context:
            known = {
                f for p in context.command.get_params(context) for f in (*p.opts, *p.secondary_opts)
            }
        known |= {f"--{alias}" for alias in ALIASES}
        yield from sorted(set(re.findall(r"--\w+", rest)) - known)


def refusal(arguments):
    """Why the command line does not accept arguments; "" if it does."""
    program = typer.main.get_command(app)
    name, *rest = arguments
    if name not in program.commands:
        return f"there is no verb {name}" if not name.startswith("-") else ""
    command = program.commands[name]
    try:
        with command.make_context(name, [*rest], parent=typer.Context(program)) as context:
            return unknown_names(context.params)
    except typer.Exit:
        return ""  # --help
    except UsageError as error:
        return error.format_message()


def unknown_names(values):
    """Why schemes or algorithms among the values of flags are not known; "" if they are."""
    named = values.get("quant_scheme")
    try:
        if named and named not in MADE_UP:
            scheme(named)
        for flag in ("quant_algo", "pre_quantization_optimization"):
            given = values.get(flag) or []
            make_algo_configs([name for part in given for name in part.split(",")], {})
    except ValueError as error:
        return str(error)
    return ""


def unknown_values(text):
    """Schemes and algorithms that a document gives to flags anywhere, and that do not exist."""
    for flag, given in VALUE.findall(text):
        if given.isupper() and "_" not in given and not given[-1].isdigit():
            continue  # a placeholder such as NAME
        if why := unknown_names({flag: given if flag == "quant_scheme" else [given]}):
            yield why


@pytest.fixture(scope="module")
def documents(root):
    files = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def test_all_commands_are_accepted(documents):
    checked = {name: [*commands(text)] for name, text in documents.items()}
    problems = [
        (name, " ".join(call), why)
        for name, calls in checked.items()
        for call in calls
        if (why := refusal(call))
    ]
    assert problems == []
    unknown = {name: [*unknown_flags(text)] for name, text in documents.items()}
    assert {name: flags for name, flags in unknown.items() if flags} == {}
    assert len(checked["README.md"]) == 4
    assert len(checked["command-line.md"]) >= 11
    assert sum(map(len, checked.values())) >= 45


def test_all_schemes_and_algorithms_exist(documents):
    unknown = {name: [*unknown_values(text)] for name, text in documents.items()}
    assert {name: why for name, why in unknown.items() if why} == {}
    assert (
        len([*unknown_values("`--quant_scheme fp9`, `--quant_algo NAME`, `--quant_algo awk`")]) == 2
    )


def messages(trees):
    """Texts in the code, with "…" for what is inserted."""
    for node in (n for tree in trees.values() for n in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def missing_messages(document, known):
    """Messages in the first column of the table of a document that no code has."""
    for message in re.findall(r"^\| `([^`]+)`", document, re.MULTILINE):
        parts = [part.strip(" '=") for part in message.split("…")]
        if not all(any(part in text for text in known) for part in parts):
            yield message


def test_messages_of_troubleshooting_exist(documents, trees):
    known = [*messages(trees)]
    assert [*missing_messages(documents["troubleshooting.md"], known)] == []
    assert [*missing_messages("| `no … such thing` | x |", known)] == ["no … such thing"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("quark quantise --model_dir a", "no verb quantise"),
        ("quark quantize --model_dir a --output_dir b --quant_schema fp8", "No such option"),
        ("quark quantize --model_dir a --output_dir b --quant_scheme fp9", "fp9"),
        ("quark quantize --model_dir a --quant_scheme fp8 --quant_algo awk", "awk"),
        ("quark evaluate a --limit many", "valid integer"),
    ],
)
def test_a_wrong_command_is_found(line, why):
    [call] = commands(f"```bash\n{line}\n```")
    assert why in refusal(call)


def test_commands_of_a_text():
    block = "torchrun --nproc_per_node 2 -m quark quantize \\\n  --x  # y\nls"
    assert [*commands(f"```bash\n{block}\n```")] == [["quantize", "--x"]]
    assert [*unknown_flags("Use `quark inspect DIR\n--check --chek` or `quark look --at`.")] == [
        "--chek",
        "look",
    ]
