"""The demonstration's text: what is in it, what is not, and that the model knows it."""

import json
import sys
from pathlib import Path

import pytest

from quark.demo import text
from quark.demo.text import calibration_documents, evaluation_documents, model_directory

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
    calibration = ["alpha.", "entities.", "\\d.", "é.", "handlers."]
    assert sorted(last_words(calibration_documents())) == sorted(calibration)
    assert last_words(calibration_documents())[0] == "alpha."


def test_limit_bounds_the_text_and_the_reading(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibration_documents()
    read: list[Path] = []
    docstrings = text._docstrings
    monkeypatch.setattr(text, "_docstrings", lambda path: read.append(path) or docstrings(path))
    limit = len(whole[0]) + 5
    assert calibration_documents(limit) == [whole[0], whole[1][:5]]
    assert len(read) < 6
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
    for documents in (evaluation_documents, calibration_documents):
        with pytest.raises(FileNotFoundError, match="source files"):
            documents()


def test_running_python() -> None:
    evaluation, calibration = evaluation_documents(), calibration_documents(150_000)
    assert sum(map(len, evaluation)) > 100_000
    assert sum(map(len, calibration)) == 150_000
    assert (evaluation, calibration) == (evaluation_documents(), calibration_documents(150_000))
    assert not set(evaluation) & set(calibration)


def test_heldout_modules_never_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    root = text._library()
    monkeypatch.setattr(
        text, "_docstrings", lambda path: read.append(path.relative_to(root).as_posix()) or "x"
    )
    calibration_documents(10**9)
    calibrating = set(read)
    read.clear()
    evaluation_documents()
    listed = json.loads((model_directory() / "heldout_modules.json").read_text(encoding="utf-8"))
    assert not calibrating & (set(read) | set(listed))
    assert "ast.py" in read
    assert "argparse.py" in calibrating
    assert not any({"test", "tests", "idle_test"} & set(name.split("/")) for name in calibrating)


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
