"""No file of the repository has a path that exists on a developer's machine only."""

import re
import subprocess

import pytest

# Folders that are somebody's own, when a path begins with them.
OWN = "|".join(["work", "root", "home", "Users", "mnt", "scratch"])
BEGIN = r"(?<![\w.~$})\]*/@%-])"  # else the slash is in the middle of a path or an address
PLACEHOLDER = r"(?!/[<{$])"
MACHINE_PATH = re.compile(
    rf"{BEGIN}/(?:{OWN})\b{PLACEHOLDER}|file:///(?:{OWN})\b|\b[A-Z]:\\+Users\b"
)


def machine_paths(text):
    """(line number, line) of each line that has such a path."""
    return [
        (number, line.strip()[:120])
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


def repository_files(root):
    """Files that are in version control or would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("this is not a checkout of the repository")
    return [root / name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def test_no_machine_path(root):
    found = {}
    for path in repository_files(root):
        try:
            lines = machine_paths(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if lines:
            found[str(path.relative_to(root))] = lines
    assert found == {}


SLASH, BACKSLASH = "/", "\\"  # so that this file passes its own check


@pytest.mark.parametrize(
    "line",
    [
        f'MODEL = "{SLASH}work/models/llama"',
        f"cd {SLASH}root",
        f"see {SLASH}home/ada/models.",
        f"path={SLASH}Users/ada",
        f"(in {SLASH}work)",
        f"file://{SLASH}home/ada/x",
        f"C:{SLASH}Users{SLASH}ada",
        f"C:{BACKSLASH}Users{BACKSLASH}ada",
        f"PATH=bin:{SLASH}home/ada/bin",
    ],
)
def test_a_machine_path_is_found(line):
    assert machine_paths(f"first\n{line}") == [(2, line)]


@pytest.mark.parametrize(
    "line",
    [
        "https://example.org/home/page",
        "../work/x",
        "~/work",
        "$HOME/work",
        "a framework/workflow",
        "{tmp}/root",
        f"{SLASH}workspace",
        f"{SLASH}home/<you>/models",
        "model/root.json",
    ],
)
def test_other_text_passes(line):
    assert machine_paths(line) == []
