"""Runs under the rules of Windows: no open or mapped file is removed, renamed or cut.

A process refuses what Windows refuses, by an audit hook. Linux tells which files it has open
(``/proc/self/fd``) and which it maps (``/proc/self/maps``).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quark.torch.pipeline.temporary_directory import sweep

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc of Linux")

RULES = """
import os, sys
from pathlib import Path

is_looking = False

def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if line.count("/")}

def opened():
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.lexists(link)}

def path_of(path, folder=-1):
    base = os.readlink(f"/proc/self/fd/{folder}") if folder != -1 else os.getcwd()
    return os.path.join(base, os.fsdecode(path))

def refuse_as_windows(event, arguments):
    global is_looking
    if is_looking or event not in ("os.rename", "os.remove", "open", "os.truncate"):
        return
    is_looking = True
    try:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, (str, bytes)) or not flags & os.O_TRUNC:
                return
        held = mapped()
        if event == "open":
            paths = [path_of(path)]
        elif event == "os.rename":
            source, target, first, second = arguments
            paths = [path_of(source, first), path_of(target, second)]
            held |= {path for path in opened() if os.path.isfile(path)}
        elif event == "os.remove":
            paths = [path_of(*arguments)]
            held |= opened()
        else:
            paths = [path_of(arguments[0])] if isinstance(arguments[0], (str, bytes)) else []
    finally:
        is_looking = False
    for path in paths:
        if any(name == path or name.startswith(path + os.sep) for name in held):
            raise PermissionError(13, "a process has it open", path)

sys.addaudithook(refuse_as_windows)
"""
VERBS = """
import os, sys
import quark.torch.pipeline.activation_store as store
import quark.torch.replacement as replacement
from quark.cli.main import main

replacement._exchange = lambda first, second: False  # Windows exchanges no directories
store.LIMIT = 0

def run(*call):
    try:
        main([str(word) for word in call])
    except SystemExit as done:
        assert not done.code, call

text = ["--dataset", "text.txt", "--num_calib_data", 3, "--seq_len", 16]
out = ["quantize", "--model_dir", "MODEL", "--output_dir", "OUT", "--skip_evaluation"]
gptq = ["--quant_scheme", "int4_wo_32", "--quant_algo", "gptq", *text]
run(*out, *gptq)
run(*out, *gptq, "--overwrite")
run(*out, *gptq, "--overwrite", "--max_memory", "3GB", "--offload_dir", "DISK")
run(*out, "--quant_scheme", "int8_wo", "--overwrite")  # file to file
run("convert", "OUT", "CONVERTED", "--to", "compressed-tensors")
run("convert", "OUT", "CONVERTED", "--to", "compressed-tensors", "--overwrite")
run("report", "OUT", "--original", "MODEL", "--dataset", "text.txt", "--seq_len", 16, "--limit", 2)
"""


@pytest.fixture
def place(model_dir, text, tmp_path):
    """A directory with a model, a text, and a place for temporary files."""
    (tmp_path / "MODEL").symlink_to(model_dir)
    (tmp_path / "text.txt").write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("DISK", "TEMPORARY"):
        (tmp_path / name).mkdir()
    return tmp_path


def run(code, place):
    environment = os.environ | {"TMPDIR": str(place / "TEMPORARY")}
    command = [sys.executable, "-c", RULES + code]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


def test_verbs_work_and_leave_nothing(place):
    done = run(VERBS, place)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    kept = {"MODEL", "text.txt", "DISK", "TEMPORARY", "OUT", "CONVERTED"}
    assert {path.name for path in place.iterdir()} == kept | {"report.html", "report.json"}
    # Files that were mapped at the end of a pass are removed by the next run.
    for folder in ("DISK", "TEMPORARY"):
        for prefix in ("quark-activations-", "quark-weights-"):
            sweep(place / folder, prefix)
        assert list((place / folder).iterdir()) == []


@pytest.mark.parametrize(
    "act",
    ["os.remove(path)", "os.replace('other', path)", "os.rename('folder', 'new')",
     "open(path, 'wb')"],
)  # fmt: skip
def test_the_rules_refuse(act, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / "folder/file").write_bytes(bytes(4096))
    code = f"""
import mmap
path = os.path.abspath("folder/file")
with open(path, "rb") as file:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
try:
    {act}
except PermissionError:
    sys.exit(7)
"""
    (tmp_path / "TEMPORARY").mkdir()
    assert run(code, tmp_path).returncode == 7
