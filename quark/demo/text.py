"""The demonstration's model and its text: docstrings of the running Python's standard library.

The model in ``quark/demo/model`` was trained on docstrings; ``heldout_modules.json`` beside it
lists the modules it has never seen. Their docstrings evaluate, those of the other modules
calibrate. Modules are parsed, never imported. The text differs a little between versions of
Python, so figures are to be compared within one run.
"""

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

TRIVIAL_LENGTH = 40  # characters up to which a docstring hardly says more than the name does
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def model_directory() -> Path:
    """Directory of the demonstration's model: configuration, weights, tokenizer.

    Raises:
        FileNotFoundError: The package is not installed as plain files, or without its data.
    """
    directory = Path(str(files("quark.demo") / "model"))
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"the demonstration's model is not at {directory}; install the package unzipped and "
            "with its data files"
        )
    return directory


def evaluation_documents() -> list[str]:
    """Docstrings of the modules the model has not seen, one document for each module.

    Modules which this version of Python lacks are passed over; of a module which has become a
    package since, every part belongs to the text.

    Returns:
        The documents, in the order of the modules' paths.

    Raises:
        FileNotFoundError: This Python has no source files of these modules.
    """
    root, names = _library(), _heldout_modules()
    held = (module for module in _modules(root) if _is_held_out(module, names))
    return _all_or_error(root, [text for module in held if (text := _docstrings(root / module))])


def calibration_documents(limit_characters: int = 400_000) -> list[str]:
    """Docstrings of the other modules, one document for each, until there is enough text.

    Args:
        limit_characters: Most characters in all documents together; the last document is cut
            to fit. Modules beyond are not read.

    Returns:
        The documents, in the order of the modules' paths.

    Raises:
        ValueError: ``limit_characters`` is below 1.
        FileNotFoundError: This Python has no source files of its standard library.
    """
    if limit_characters < 1:
        raise ValueError(f"limit_characters must be at least 1, got {limit_characters}")
    root, names = _library(), _heldout_modules()
    documents: list[str] = []
    room = limit_characters
    for module in _modules(root):
        if room == 0:
            break
        if not _is_held_out(module, names) and (text := _docstrings(root / module)):
            documents.append(text[:room])
            room -= len(documents[-1])
    return _all_or_error(root, documents)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _heldout_modules() -> frozenset[str]:
    """Paths below the library, such as ``html/parser.py``."""
    listed = (model_directory() / "heldout_modules.json").read_text(encoding="utf-8")
    return frozenset(json.loads(listed))


def _is_held_out(module: str, names: frozenset[str]) -> bool:
    """Whether a module is listed, or part of a package that was one listed module before.

    ``zipfile.py`` in the list holds out ``zipfile/__init__.py`` and ``zipfile/_path/glob.py``;
    ``logging/__init__.py`` holds out itself alone.
    """
    if module in names:
        return True
    parents = module.split("/")[:-1]
    return any("/".join(parents[: i + 1]) + ".py" in names for i in range(len(parents)))


def _modules(root: Path) -> list[str]:
    """Paths of the library's modules below ``root``, with ``/`` on every system, sorted.

    Tests are left out, and what is not a module by its name: ``site-packages``,
    ``config-3.11-x86_64-linux-gnu`` and the like.
    """
    return sorted(path.relative_to(root).as_posix() for path in _sources(root))


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name.isidentifier() and name not in TEST_FOLDERS]
        for name in names:
            stem, suffix = Path(name).stem, Path(name).suffix
            if suffix == ".py" and stem.isidentifier():
                yield Path(folder, name)


def _docstrings(path: Path) -> str:
    """Docstrings of a module, its classes and functions, blank lines between; "" if unreadable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in literals, not ours to mend
            tree = ast.parse(path.read_bytes())  # bytes: the file itself declares its encoding
    except (OSError, SyntaxError, ValueError):
        return ""
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return "\n\n".join(text.strip() for text in texts if text and len(text) > TRIVIAL_LENGTH)


def _all_or_error(root: Path, documents: list[str]) -> list[str]:
    if not documents:
        raise FileNotFoundError(
            f"no docstrings below {root}: this Python comes without its library's source files; "
            "use a full installation, or give text of your own"
        )
    return documents
