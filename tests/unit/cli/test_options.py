"""Flags with several values, and verbs whose flags are the fields of a dataclass."""

from dataclasses import dataclass, field
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quark.cli.main import app
from quark.cli.options import ManyValues, add_verb, verb


@dataclass(frozen=True, kw_only=True)
class Flags:
    names: Annotated[list[str] | None, typer.Option()] = None
    count: Annotated[int, typer.Option()] = 3
    given: frozenset[str] = field(default_factory=frozenset)


class Command(ManyValues):
    many = ("names",)


@pytest.fixture
def call():
    """Call a verb with these flags; returns the exit code and the flags that it was run with."""

    def call(*arguments, cls=Command):
        own, runs = typer.Typer(), []
        add_verb(own, "work", verb(Flags, runs.append), "Work.", cls)
        own.command("other")(lambda: None)
        code = CliRunner().invoke(own, ["work", *arguments]).exit_code
        return code, runs

    return call


@pytest.mark.parametrize(
    ("arguments", "names", "count", "given"),
    [
        ([], None, 3, set()),
        (["--names", "a", "b", "--count", "4"], ["a", "b"], 4, {"names", "count"}),
        (["--names", "--count", "3"], [""], 3, {"names", "count"}),
        (["--names", "a", "--names", "b"], ["a", "b"], 3, {"names"}),
    ],
    ids=["none", "several", "no value", "repeated"],
)
def test_fields_are_flags(arguments, names, count, given, call):
    code, (flags,) = call(*arguments)
    assert code == 0
    assert (flags.names, flags.count, flags.given) == (names, count, given)


def test_a_flag_with_one_value_given_twice_warns(call, caplog):
    code, (flags,) = call("--count", "4", "--names", "a", "--names", "b", "--count", "5")
    assert (code, flags.count, flags.names) == (0, 5, ["a", "b"])
    assert caplog.messages == ["--count is given 2 times: the last value counts."]
    caplog.clear()
    assert call("--verbose", "--verbose")[0] == 0
    assert not caplog.messages


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", ""],
        ["convert", "IN", ""],
        ["compare", "A", ""],
        ["quantize", "--model_dir", ""],
        ["quantize", "--model_dir", "A", "--output_dir="],
        ["quantize", "--model_dir", "A", "--quant_algo", ""],
        ["report", "A", "--output", ""],
    ],
    ids=" ".join,
)
def test_an_empty_value_is_refused(words):
    """Else a variable of the shell that is not set means the working directory, or the default."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert " is empty. Give a value, or leave it out. (quark" in result.stderr


def test_typer_alone_takes_one_value_of_a_flag(call):
    """This is why ``ManyValues`` exists: the documented script has flags with several values."""
    code, runs = call("--names", "a", "b", cls=None)
    assert (code, runs) == (2, [])


def test_typer_alone_makes_no_flags_of_a_dataclass():
    """This is why ``verb`` exists."""
    own = typer.Typer()

    @own.command()
    def work(flags: Flags) -> None:
        raise AssertionError(flags)

    result = CliRunner().invoke(own, ["--count", "4"])
    assert result.exit_code == 2
    assert "No such option: --count" in result.output
