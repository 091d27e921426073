"""Pages of the site that are not in ``docs``: README and others, and the reference.

    pip install -e ".[site]"
    mkdocs build

The reference is made from the command line and from docstrings. `mkdocs.yml` names this file.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# File -> page.
COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/three_texts.md": "three-texts.md",
    "examples/README.md": "examples.md",
}
COMMANDS, PYTHON = "reference-commands.md", "reference-python.md"
STYLE = "narrow.css"
LINK = re.compile(r"(?<=\[)([^\[\]]*)\]\((?!\w+:)([^)#\s]*)(#[^)]*)?\)")
INLINE = re.compile(r"<code>[^<]*</code>")
FLAG = re.compile(r"--\w+")
DATE = re.compile(r"(?<=<td>)\d{4}-\d\d-\d\d(, \d\d)*(?=</td>)")
WHOLE = r'<span style="white-space: nowrap">\g<0></span>'
# On a phone, columns of tables are as wide as their words. The theme gives them at least 5 rem.
RULES = """@media (max-width: 44.9em) {
  .md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.6em 0.5em; }
}
"""
INTRODUCTION = """# Python

These names are imported from `quark.torch`. [Command line](command-line.md) and
[algorithms](algorithms.md) explain the options.

"""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages; called by mkdocs."""
    from mkdocs.structure.files import File

    texts = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in COPIED.items()}
    texts |= {COMMANDS: commands_page(), PYTHON: python_page()}
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, STYLE, content=RULES))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links between files to their pages; called by mkdocs."""
    source = next((k for k, v in COPIED.items() if v == page.file.src_uri), None)
    folder, titles = Path(source).parent if source else Path("docs"), page_titles(config["nav"])

    def change(link: re.Match[str]) -> str:
        words, path = link[1], target(folder, link[2])
        words = titles[path] if words.endswith(".md") else words
        return f"{words}]({path}{link[3] or ''})"

    return LINK.sub(change, markdown)


def page_titles(nav: list[dict[str, Any]]) -> dict[str, str]:
    """Return the title of each page in the navigation."""
    titles: dict[str, str] = {}
    for title, place in (pair for entry in nav for pair in entry.items()):
        titles |= {place: title} if isinstance(place, str) else page_titles(place)
    return titles


def on_page_content(html: str, **_: Any) -> str:
    """Keep flags in a sentence, and dates in tables, on one line; called by mkdocs."""
    html = INLINE.sub(lambda code: FLAG.sub(WHOLE, code[0]), html)
    return DATE.sub(WHOLE, html)


def target(folder: Path, link: str) -> str:
    """Return the link of a page, for a link from a file of a folder.

    Files that have no page, such as folders of code, lead to the page about the code.
    """
    if not link:
        return ""
    path = (ROOT / folder / link).resolve()
    name = path.relative_to(ROOT).as_posix()
    if name in COPIED:
        return COPIED[name]
    is_page = path.parent == ROOT / "docs" and path.is_file()
    return path.name if is_page else COPIED["CONTRIBUTING.md"]


def commands_page() -> str:
    """Return the help of all commands."""
    import typer
    from typer.cli import get_docs_for_click

    from quark.cli.main import app

    program = typer.main.get_command(app)
    context = typer.Context(program, info_name="quark")
    text: str = get_docs_for_click(obj=program, ctx=context, name="quark", title="Commands")
    return re.sub(r"\[/?(?:cyan|bold|yellow|dim)\]", "", text)


def python_page() -> str:
    """Return the reference of all public names of ``quark.torch``."""
    from quark.torch import _NAMES

    names = sorted(f"quark.torch.{module}.{name}" for name, module in _NAMES.items())
    return INTRODUCTION + "\n".join(f"::: {name}\n" for name in names)
