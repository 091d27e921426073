"""The blocks of the README run as they are printed, one after the other, in one directory."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quark.demo.text import model_directory

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def shell_block(mark):
    """The shell commands between ``<!-- mark -->`` and ``<!-- end -->``."""
    (block,) = re.findall(rf"<!-- {mark} -->\n```bash\n(.*?)```\n<!-- end -->", README, re.S)
    return block


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with what the README names: the first block of the shipped model, twice."""
    folder = tmp_path_factory.mktemp("readme")
    model = AutoModelForCausalLM.from_pretrained(model_directory(), num_hidden_layers=1)
    model.save_pretrained(folder / "MODEL")
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(folder / "MODEL")
    shutil.copytree(folder / "MODEL", folder / "quark/demo/model")
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()  # the environment of the tests is active
    return folder


def run_shell(block, folder):
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [shutil.which("bash"), "-euxc", block]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@needs_bash
def test_the_way_from_a_model_to_a_server(place):
    shown = run_shell(shell_block("way"), place)
    before, after = map(float, re.findall(r"perplexity +([\d.]+) → ([\d.]+)", shown)[0])
    assert 1 < before < after < 1.1 * before
    assert list((place / "int4-gguf").glob("*.gguf"))
    assert "int4" in (place / "int4.html").read_text(encoding="utf-8")
    assert (place / "int4/model.safetensors").stat().st_size < 4_000_000


def test_python(place, monkeypatch):
    monkeypatch.chdir(place)
    names = {}
    (block,) = PYTHON
    exec(compile(block, "README.md", "exec"), names)
    assert names["model"].config.quantization_config.quant_method == "quark"
