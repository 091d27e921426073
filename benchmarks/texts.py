"""Texts that evaluate models which were calibrated on docstrings: alike, code, other scripts.

- ``docstrings``: docstrings of modules of the running Python that were held out of calibration;
- ``code``: the source of the same modules without docstrings and comments;
- ``scripts``: ``scripts.txt``, prose in Korean, Chinese, Russian, Greek, Hindi, Arabic, Japanese,
  Hebrew and Thai, written for this benchmark; MIT, as this package.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from quark.demo.text import DOCUMENTED, evaluation_documents, heldout_modules

SCRIPTS = Path(__file__).resolve().parent / "scripts.txt"
LONGEST = 6000  # characters of a document, so that some windows hold many


def evaluation_texts() -> dict[str, list[str]]:
    """Return the documents of each text by its name; that which is like calibration comes first."""
    return {
        "docstrings": [text[:LONGEST] for text in evaluation_documents()],
        "code": [text[:LONGEST] for text in code_documents()],
        "scripts": SCRIPTS.read_text(encoding="utf-8").split("\n\n"),
    }


def code_documents() -> list[str]:
    """Return the source of the held-out modules of the running Python, without docstrings."""
    root = Path(sysconfig.get_path("stdlib"))
    return [_code((root / module).read_bytes()) for module in heldout_modules()]


def _code(source: bytes) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
