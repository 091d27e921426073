"""The shell blocks of the documents run as they are printed, one document in one directory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quark.demo.real import PACKAGE, real_model_file
from tests.contract.blocks import NOT_RUN, ROOT, SUBSTITUTED, all_blocks, blocks_to_run

SHELL = blocks_to_run("bash")
TUTORIAL = "docs/tutorial.md"
QUICK = "--skip_evaluation"
GRAPH = """
import torch
from safetensors.torch import save_file

net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()).eval()
images = torch.randn(8, 3, 8, 8)
torch.export.save(torch.export.export(net, (images[:1],)), "net.pt2")
save_file({"input": images}, "samples.safetensors")
with open("my_nets.py", "w") as file:
    file.write("import torch\\n\\n\\ndef resnet():\\n    return torch.nn.Conv2d(3, 4, 3)\\n")
"""
EXPERTS = """
import runpy
runpy.run_path("examples/experts.py")["make_model"]().save_pretrained("MOE")
"""
# Document -> commands that make what it takes for granted.
BEFORE = {
    "docs/checkpoint-format.md": "quark quantize --model_dir MODEL --output_dir deepseek-fp8 "
    f"--quant_scheme fp8 --custom_mode fp8 --dataset calibration.txt {QUICK}",
    "docs/experts.md": f"python -c '{EXPERTS}'; cp MODEL/tokenizer* MOE",
    "docs/graph-mode.md": f"python -c '{GRAPH}'",
    "docs/large-models.md": "quark quantize --model_dir MODEL --output_dir MODEL-FP8 "
    f"--quant_scheme ptpc_fp8 {QUICK}",
    "docs/mixed-precision.md": "for i in 0 1 2 3; do (echo part $i; cat calibration.txt) "
    "> text-$i.txt; done",
    "docs/report.md": "ln -s MODEL my-model; "
    f"quark quantize --model_dir MODEL --output_dir my-model-int4 {QUICK} "
    "--quant_scheme int4_wo_32; "
    f"quark quantize --model_dir MODEL --output_dir my-model-fp8 {QUICK} --quant_scheme fp8_wo",
}
# Document -> files that its commands write.
WRITTEN = {
    "docs/algorithms.md": ["AWQ", "INT8", "OUT"],
    "docs/calibration.md": ["OWN", "MIXED", "sampled.jsonl", "SAMPLED"],
    "docs/checkpoint-format.md": ["deepseek-int4"],
    "docs/choosing-a-scheme.md": ["EIGHT", "FOUR"],
    "docs/command-line.md": [
        "OUT",
        "SECOND",
        "FP8",
        "AWQ",
        "W4",
        "MIXED",
        "sampled.jsonl",
        "report.html",
    ],
    "docs/experts.md": ["EXPERTS", "ALL"],
    "docs/graph-mode.md": ["OUT/net_quantized.pth", "ONNX/quark_model.onnx"],
    "docs/large-models.md": ["plan.json", "OUT"],
    "docs/mixed-precision.md": ["STATISTICS", "INT4", "INT3", "FP8", "mixed.json", "OUT"],
    "docs/onnx.md": ["OUT/quark_model.onnx"],
    "docs/report.md": ["report.html", "numbers.json", "comparison.html"],
    "docs/serve.md": ["INT4", "INT4-CT", "INT4-GGUF", "INT8-ONNX/quark_model.onnx"],
    "docs/tutorial.md": ["smol-int4", "smol-gptq", "report.html", "smol-gguf"],
    "examples/README.md": ["FP8-CACHE", "GPTQ"],
}


@pytest.fixture
def place(tmp_path, one_block):
    """A directory with what the documents name: a model and texts."""
    shutil.copytree(one_block, tmp_path / "MODEL")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tmp_path / "calibration.txt").write_text(text[:8000], encoding="utf-8")
    (tmp_path / "test.txt").write_text(text[8000:12000], encoding="utf-8")
    (tmp_path / "smooth.json").write_text('{"name": "smooth", "alpha": 0.5}', encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(commands, folder):
    """Run commands in bash, until one fails."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1"}
    command = [shutil.which("bash"), "-euo", "pipefail", "-xc", commands]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("document", sorted(set(SHELL) - {TUTORIAL}))
def test_commands(document, place):
    commands = [BEFORE.get(document, ""), *(block.code for block in SHELL[document])]
    run("\n".join(commands), place)
    assert [name for name in WRITTEN[document] if not (place / name).exists()] == []


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_tutorial_on_the_real_model(tmp_path):
    try:
        real_model_file()
    except FileNotFoundError:
        pytest.skip(f"{PACKAGE}, which holds the real model, is not installed")
    run("\n".join(block.code for block in SHELL[TUTORIAL]), tmp_path)
    assert [name for name in WRITTEN[TUTORIAL] if not (tmp_path / name).exists()] == []


def test_every_block_runs_or_has_a_reason():
    blocks = all_blocks()
    assert len(blocks) >= 58
    assert set(SHELL) == set(WRITTEN)
    unused = [key for key in NOT_RUN if not any(block.is_at(*key) for block in blocks)]
    assert unused == []
    texts = {name: "".join(b.text for b in blocks if b.document == name) for name in SUBSTITUTED}
    missing = [
        (name, before)
        for name, changes in SUBSTITUTED.items()
        for before in changes
        if before not in texts[name]
    ]
    assert missing == []
