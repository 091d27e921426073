"""The demonstration's model, the text that evaluates it, and the text that calibrates models.

The model in ``quark/demo/model`` was trained on docstrings of Python's standard library.
``heldout_modules.json`` in the same folder lists the modules that were held out of training. The
docstrings of the running Python's modules of these names are for evaluation. Modules are parsed,
never imported. This text differs a little between versions of Python, so compare figures of one run
only.

The calibration text is the same for every Python: ``quark/demo/calibration`` holds it, and states
its sources and licences.
"""

import ast
import json
import lzma
import os
import sysconfig
import warnings
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

CALIBRATION_TEXT = "calibration/text.jsonl.xz"
TRIVIAL_LENGTH = 40  # shorter docstrings, in characters, say little more than the name
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def model_directory() -> Path:
    """Return the directory of the shipped model: configuration, weights, tokenizer.

    Raises:
        FileNotFoundError: The package is not installed as plain files, or without its data.
    """
    directory = Path(str(files("quark.demo") / "model"))
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"the shipped model is not at {directory}; install the package unzipped and with its "
            "data files"
        )
    return directory


def evaluation_documents() -> list[str]:
    """Return the docstrings of the held-out modules, one document for each module.

    Modules that this version of Python lacks are skipped. If a module has become a package since,
    all its parts are held out.

    Returns:
        The documents, in the order of the modules' paths.

    Raises:
        FileNotFoundError: This Python has no source files of these modules.
    """
    root, held = _library(), heldout_modules()
    return _all_or_error(root, [text for module in held if (text := _docstrings(root / module))])


def heldout_modules() -> list[str]:
    """Return the sorted paths of the held-out modules, below the library of this Python."""
    names = _heldout_modules()
    return [module for module in _modules(_library()) if _is_held_out(module, names)]


def training_documents(limit_characters: int) -> list[str]:
    """Return docstrings of the modules that are not held out, one document for each module.

    The shipped model was trained on such text. Benchmarks calibrate on it.

    Args:
        limit_characters: Maximum number of characters in all documents together. The last document
            is cut to fit. Later modules are not read.

    Returns:
        The documents, in the order of the modules' paths.

    Raises:
        FileNotFoundError: This Python has no source files of its standard library.
    """
    root, names = _library(), _heldout_modules()
    modules = (module for module in _modules(root) if not _is_held_out(module, names))
    texts = (text for module in modules if (text := _docstrings(root / module)))
    return _all_or_error(root, _limited(texts, limit_characters))


def calibration_documents(limit_characters: int = 400_000) -> list[str]:
    """Return the calibration text of this package, in prose, code, dialogues and lists.

    Args:
        limit_characters: Maximum number of characters in all documents together. The last document
            is cut to fit.

    Returns:
        The documents, in the order of the file.

    Raises:
        ValueError: ``limit_characters`` is below 1.
        FileNotFoundError: The package is installed without its data.
    """
    if limit_characters < 1:
        raise ValueError(f"limit_characters must be at least 1, got {limit_characters}")
    with lzma.open(str(files("quark.demo") / CALIBRATION_TEXT)) as lines:
        return _limited((json.loads(line)["text"] for line in lines), limit_characters)


def _limited(documents: Iterator[str], limit: int) -> list[str]:
    """Return the first documents, up to a number of characters; the last one is cut to fit."""
    chosen: list[str] = []
    for document in documents:
        chosen.append(document[:limit])
        limit -= len(chosen[-1])
        if limit == 0:
            break
    return chosen


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _heldout_modules() -> frozenset[str]:
    """Return the paths of the held-out modules below the library, such as ``html/parser.py``."""
    listed = (model_directory() / "heldout_modules.json").read_text(encoding="utf-8")
    return frozenset(json.loads(listed))


def _is_held_out(module: str, names: frozenset[str]) -> bool:
    """Whether a module is listed, or is part of a package that was a listed module before.

    ``zipfile.py`` in the list holds out ``zipfile/__init__.py`` and ``zipfile/_path/glob.py``;
    ``logging/__init__.py`` holds out only itself.
    """
    if module in names:
        return True
    parents = module.split("/")[:-1]
    return any("/".join(parents[: i + 1]) + ".py" in names for i in range(len(parents)))


def _modules(root: Path) -> list[str]:
    """Return the sorted paths of the library's modules below ``root``, with ``/`` on every system.

    Tests are left out, and so are files and folders whose name is not that of a module:
    ``site-packages``, ``config-3.11-x86_64-linux-gnu`` and others.
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
    """Return the docstrings of a module, its classes and functions; "" if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in literals
            tree = ast.parse(path.read_bytes())  # bytes: the file itself declares its encoding
    except (OSError, SyntaxError, ValueError):
        return ""
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED))
    return "\n\n".join(text.strip() for text in texts if text and len(text) > TRIVIAL_LENGTH)


def _all_or_error(root: Path, documents: list[str]) -> list[str]:
    if not documents:
        raise FileNotFoundError(
            f"no docstrings below {root}: this Python lacks the source files of its library; use a "
            "full installation, or give your own text"
        )
    return documents
