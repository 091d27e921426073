"""The demonstration's text: what is in it, what is not, and that the model knows it."""

import hashlib
import json
import lzma
import sys
from collections import Counter
from pathlib import Path

import pytest

from quark.demo import text
from quark.demo.text import (
    calibration_documents,
    evaluation_documents,
    model_directory,
    training_documents,
)

LONG = "A docstring of more than forty characters, as the text wants them"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small standard library with two held-out modules, one of which is now a package."""
    sources = {
        "alpha.py": f'"""{LONG}: alpha."""',
        "zipfile.py": f'"""{LONG}: zipfile."""',
        "logging/__init__.py": f'"""{LONG}: logging."""',
        "logging/handlers.py": f'"""{LONG}: handlers."""',
        "html/parser/__init__.py": f'"""{LONG}: parser."""',
        "html/parser/_inner/deep.py": f'"""{LONG}: deep."""',
        "html/entities.py": f'"""{LONG}: entities."""',
        "test/test_alpha.py": f'"""{LONG}: left out."""',
        "html/tests/test_html.py": f'"""{LONG}: left out."""',
        "site-packages/other.py": f'"""{LONG}: left out."""',
        "config-3-linux/tool.py": f'"""{LONG}: left out."""',
        "some-script.py": f'"""{LONG}: left out."""',
        "broken.py": f'"""{LONG}: left out."""\ndef (',
        "undocumented.py": '"""Short."""',
        "escapes.py": f'"""{LONG}: \\d."""',
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(f'# coding: latin-1\n"""{LONG}: é."""'.encode("latin-1"))
    (tmp_path / "wrong.py").write_bytes(f'"""{LONG}: é."""'.encode("latin-1"))
    names = frozenset({"zipfile.py", "logging/__init__.py", "html/parser.py", "absent.py"})
    monkeypatch.setattr(text, "_library", lambda: tmp_path)
    monkeypatch.setattr(text, "_heldout_modules", lambda: names)
    return tmp_path


def last_words(documents: list[str]) -> list[str]:
    return [document.split(": ")[1] for document in documents]


@pytest.mark.filterwarnings("error")
def test_modules_are_divided_in_order(library: Path) -> None:
    assert last_words(evaluation_documents()) == ["parser.", "deep.", "logging.", "zipfile."]
    training = last_words(training_documents(10**9))
    assert sorted(training) == sorted(["alpha.", "entities.", "\\d.", "é.", "handlers."])
    assert training[0] == "alpha."


def test_limit_bounds_the_training_text_and_the_reading(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training_documents(10**9)
    read: list[Path] = []
    docstrings = text._docstrings
    monkeypatch.setattr(text, "_docstrings", lambda path: read.append(path) or docstrings(path))
    limit = len(whole[0]) + 5
    assert training_documents(limit) == [whole[0], whole[1][:5]]
    assert len(read) < 6


def test_limit_bounds_the_text() -> None:
    whole = calibration_documents(10**9)
    limit = len(whole[0]) + 5
    assert calibration_documents(limit) == [whole[0], whole[1][:5]]
    with pytest.raises(ValueError, match="at least 1"):
        calibration_documents(0)


def test_docstrings_of_a_module(tmp_path: Path) -> None:
    source = f'''"""{LONG}: module."""
def function():
    """{LONG}: function.

        indented
    """
class Class:
    """{LONG}: class."""
    def short(self):
        """Too short."""
    async def method(self):
        """{LONG}: method.   """
'''
    (tmp_path / "module.py").write_text(source)
    assert text._docstrings(tmp_path / "module.py").split("\n\n") == [
        f"{LONG}: module.",
        f"{LONG}: function.",
        "indented",
        f"{LONG}: class.",
        f"{LONG}: method.",
    ]
    assert text._docstrings(tmp_path / "absent.py") == ""


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_library", lambda: tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="source files"):
        evaluation_documents()


def test_running_python() -> None:
    evaluation, calibration = evaluation_documents(), calibration_documents(150_000)
    training = training_documents(150_000)
    assert sum(map(len, evaluation)) > 100_000
    assert sum(map(len, calibration)) == sum(map(len, training)) == 150_000
    assert (evaluation, calibration) == (evaluation_documents(), calibration_documents(150_000))
    assert not set(evaluation) & {*calibration, *training}


def records() -> list[dict[str, str]]:
    with lzma.open(model_directory().parent / "calibration" / "text.jsonl.xz") as lines:
        return [json.loads(line) for line in lines]


def test_heldout_modules_never_calibrate() -> None:
    listed = json.loads((model_directory() / "heldout_modules.json").read_text(encoding="utf-8"))
    modules = {r["name"] for r in records() if r["source"].startswith("docstrings")}
    assert len(modules) == 42 and not modules & set(listed)
    evaluation = [
        line.strip() for document in evaluation_documents() for line in document.split("\n")
    ]
    shared = {line for line in evaluation if len(line) > 60} & {
        line.strip() for document in calibration_documents() for line in document.split("\n")
    }
    assert len(shared) <= 5, shared  # phrases that later versions of Python may repeat


def test_the_calibration_text_is_fixed() -> None:
    """Whatever Python runs; a change of the text needs a note in the changelog."""
    documents = calibration_documents(10**9)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    assert digest.startswith("25cff1c13a7e0faa") and len(documents) == 155


def test_every_kind_of_text_is_at_the_beginning_and_documented() -> None:
    readme = (model_directory().parent / "calibration" / "README.md").read_text(encoding="utf-8")
    counts = Counter(record["source"] for record in records())
    assert counts == Counter({s: counts[s] for s in {r["source"] for r in records()[:15]}})
    for source, count in counts.items():
        assert f"| `{source}` | {count} |" in readme


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    evaluation_documents()
    calibration_documents(20_000)
    assert not {"antigravity", "this", "turtledemo.rosette"} & (set(sys.modules) - before)


def test_model_knows_the_text() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from quark.torch.evaluation.perplexity import perplexity, token_windows

    directory = model_directory()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    windows = token_windows(evaluation_documents(), tokenizer, 256, limit=24)
    assert 20 < perplexity(model, windows) < 80  # 2048 if it had learnt nothing
