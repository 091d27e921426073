"""``quark conform``: its table, page, JSON and exit status."""

import json

import pytest

from quark.cli.conform import command
from quark.conformance.comparison import Comparison

FINE = Comparison("fp4", "round", 1000, 0, 2, "of 1, here 2, defined 2, theirs 1")


@pytest.fixture
def compared(monkeypatch):
    """Set the comparisons of every oracle; only definitions and gfloat are installed."""
    steps = []

    def compared(*comparisons):
        def run(name, every=1):
            steps.append((name, every))
            return iter(comparisons)

        installed = {"definitions", "gfloat"}
        monkeypatch.setattr(command, "run", run)
        monkeypatch.setattr(command, "is_installed", installed.__contains__)
        monkeypatch.setattr(command, "version", lambda name: "1.2")
        return steps

    return compared


def test_table(quark, compared):
    steps = compared(FINE)
    result = quark("conform")
    assert result.exit_code == 0, result.output
    assert steps == [("definitions", 1), ("gfloat", 1)]
    words = " ".join(result.stdout.split())
    assert "gfloat 1.2 fp4 1,000 0 2" in words
    assert "gfloat, fp4, round: of 1, here 2, defined 2, theirs 1" in words
    assert "Not installed: torch, ml_dtypes" in words


def test_differences_fail(quark, compared):
    compared(FINE._replace(differences=1))
    assert quark("conform", "--oracle", "definitions").exit_code == 1


def test_quick_json_and_page(quark, compared, tmp_path):
    steps = compared(FINE)
    page = tmp_path / "page.md"
    result = quark("conform", "--oracle", "gfloat", "--quick", "--json", "--page", page)
    assert result.exit_code == 0, result.output
    assert steps == [("gfloat", command.QUICK)]
    (run,) = json.loads(result.stdout)["oracles"]
    assert (run["oracle"], run["version"], run["is_installed"]) == ("gfloat", "1.2", True)
    assert run["comparisons"] == [FINE._asdict()]
    assert "| fp4 | gfloat 1.2 | 1,000 | 0 | 2 |" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--oracle", "gfloot"], "gfloat"),
        (["--oracle", "torchao"], "torchao cannot be imported. Install it, or leave it out."),
        (["--checkpoints", "x.json"], "give --page too"),
        (["--page", "missing/page.md"], "missing"),
        (["--page", "page.md", "--checkpoints", "x.json"], "x.json"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(
    quark, compared, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    steps = compared(FINE)
    result = quark("conform", *arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
    assert steps == [] and list(tmp_path.iterdir()) == []


def test_an_existing_page_stays(quark, compared, tmp_path):
    steps, page = compared(FINE), tmp_path / "page.md"
    page.write_text("mine")
    assert quark("conform", "--page", page).exit_code == 2
    assert steps == [] and page.read_text() == "mine"
    assert quark("conform", "--page", page, "--overwrite").exit_code == 0
    assert page.read_text().startswith("# Conformance")
