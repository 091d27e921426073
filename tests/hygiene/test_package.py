"""The metadata of the package: index page, extras, licences, Python versions, container file."""

import re
import shlex
import tomllib

import pytest

LINK = re.compile(r"\]\((?!https?:|#)([^)]*)\)")


@pytest.fixture(scope="module")
def settings(root):
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def index_page(root, settings):
    """The README as the build writes it into the metadata."""
    text = (root / "README.md").read_text(encoding="utf-8")
    hook = settings["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for step in hook["substitutions"]:
        text = re.sub(step["pattern"], step["replacement"], text)
    return text


def test_links_to_files_are_names_of_files_on_the_index_page(root, index_page):
    before = (root / "README.md").read_text(encoding="utf-8")
    files = [link.partition("#")[0] for link in LINK.findall(before)]
    assert files
    assert LINK.findall(index_page) == []
    pages = {file for file in files if file.endswith(".md")}
    assert [file for file in pages if file not in index_page] == []
    assert not re.search(r"\(([^()]*) \(\1\)\)", index_page)  # no name twice


def test_python_versions_agree(root, settings):
    project = settings["project"]
    oldest = re.fullmatch(r">=3\.(\d+)", project["requires-python"])[1]
    prefix = "Programming Language :: Python :: 3."
    versions = [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)]
    assert versions[0] == oldest
    assert [int(v) for v in versions] == sorted(map(int, versions))
    workflow = (root / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert [v for v in versions if f'"3.{v}"' not in workflow] == []


def test_all_is_the_union_of_the_features(settings):
    extras = settings["project"]["optional-dependencies"]
    features = set(extras) - {"all", "dev", "site"}
    assert set(extras["all"]) == {line for name in features for line in extras[name]}


def test_licences_of_others_are_named(root, settings):
    named = settings["project"]["license-files"]
    assert all((root / path).is_file() for path in named)
    assert "quark/torch/report/plotly/LICENSE" in named


def test_the_container_installs_what_the_package_declares(root, settings):
    lines = (root / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    (install,) = (shlex.split(step[1]) for step in steps if step[0] == "RUN")
    command = install[: install.index("&&")]
    assert command[:2] == ["pip", "install"]
    assert command[command.index("--constraint") + 1] == "constraints.txt"
    extras = re.fullmatch(r"\.\[(.*)\]", command[-1])[1].split(",")
    assert set(extras) <= set(settings["project"]["optional-dependencies"])
    copied = [word for step in steps if step[0] == "COPY" for word in step[1].split()[:-1]]
    kept = (root / ".dockerignore").read_text(encoding="utf-8").split()
    assert sorted(f"!{name}" for name in copied) == [line for line in kept if line[0] == "!"]
    needed = {*settings["project"]["license-files"], "README.md", "pyproject.toml"}
    assert {path.partition("/")[0] for path in needed} <= set(copied)
    image = next(step[1] for step in steps if step[0] == "FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", image)[1]
    assert f"Programming Language :: Python :: {version}" in settings["project"]["classifiers"]
    users = [step[1] for step in steps if step[0] == "USER"]
    assert users and users[-1] != "root"
    (entry,) = (step[1] for step in steps if step[0] == "ENTRYPOINT")
    assert entry == '["quark"]'
    assert "quark" in settings["project"]["scripts"]


def test_no_dependency_draws(settings):
    """This is why ``quark/torch/search/chart.py`` writes its SVG itself."""
    extras = settings["project"]["optional-dependencies"]
    lines = [*settings["project"]["dependencies"], *(x for group in extras.values() for x in group)]
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in lines}
    drawing = {"altair", "bokeh", "kaleido", "matplotlib", "plotly", "pygal", "seaborn", "svgwrite"}
    assert names & drawing == set()
