"""Two distributions that provide the import package quark, in one directory."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quark


def imported(place):
    """Import the package as it lies in a directory; return the last line of what went wrong."""
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import quark; print(quark.__file__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout + done.stderr).splitlines()[-1]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "quark").mkdir()
    shutil.copy(Path(quark.__file__), tmp_path / "quark")
    (tmp_path / f"quark_quantizer-{quark.__version__}.dist-info").mkdir()
    return tmp_path


def test_alone(place):
    for other in ("torch-2.13.0.dist-info", "quarkus-1.0.dist-info", "amd_quark"):
        (place / other).mkdir()
    code, said = imported(place)
    assert (code, Path(said)) == (0, place / "quark" / "__init__.py")


@pytest.mark.parametrize(
    ("others", "named", "uninstalled"),
    [
        (["amd_quark-0.13"], "amd_quark-0.13", "amd-quark"),
        (["quark-2.1"], "quark-2.1", "quark"),
        (["quark-2.1", "amd_quark-0.13"], "amd_quark-0.13 and quark-2.1", "amd-quark quark"),
    ],
)
def test_mixed_with_another(place, others, named, uninstalled):
    for other in others:
        (place / f"{other}.dist-info").mkdir()
    code, said = imported(place)
    assert code == 1
    assert said.startswith(
        f"ImportError: {place} holds quark-quantizer {quark.__version__} and {named}: both provide"
    )
    assert f"pip uninstall {uninstalled} quark-quantizer" in said
