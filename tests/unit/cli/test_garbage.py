"""Collections of garbage in a process of the command line."""

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from quark.cli import main


def test_modules_are_not_collected_at_the_end_of_the_process():
    """A cycle of a module stays as it is: nothing calls its finalizer."""
    code = (
        "import gc, sys; gc.disable(); from quark.cli.main import main\n"
        "class Cycle:\n"
        "    def __del__(self):\n"
        "        sys.__stdout__.write('collected')\n"
        "cycle = Cycle(); cycle.own = cycle; del cycle\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quark ")
    assert "collected" not in done.stdout


@pytest.mark.parametrize(
    ("file", "maker", "is_kept"),
    [("lib.so", "nanobind", False), ("lib.so", "builtins", True), ("lib.py", "nanobind", True)],
)
def test_objects_are_freed_where_a_package_reports_leaks(file, maker, is_kept, monkeypatch):
    """Modules of nanobind print each object that is left at the end of the process."""
    module = ModuleType("fake_extension")
    module.__file__ = file
    module.function = type("nb_func", (), {"__module__": maker})()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    main._keep_objects()
    assert bool(frozen) == is_kept


def test_imports_of_a_verb_start_no_full_collection():
    """Young objects are collected; a cycle of them is freed."""
    code = (
        "import contextlib, gc, sys; from quark.cli.main import main\n"
        "full, young = (gc.get_stats()[g]['collections'] for g in (2, 0))\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['inspect', 'no-such-directory'])\n"
        "import torch, quark.torch.export.recognition\n"
        "print(*(gc.get_stats()[g]['collections'] - n for g, n in ((2, full), (0, young))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    full, young = map(int, done.stdout.split()[-2:])
    assert full == 0
    assert young > 100
