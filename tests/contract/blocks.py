"""Blocks of commands and of Python in the documents, and what is changed before they run."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# (Document, beginning of the block) -> why no test of this folder runs it.
NOT_RUN = {
    ("README.md", "python3 -m venv"): "installs; .ci/run runs it in a fresh clone",
    ("README.md", "source .venv"): "test_readme.py runs it",
    ("README.md", "import torch"): "test_readme.py runs it",
    ("CONTRIBUTING.md", "python -m venv"): "installs; .ci/run does the same in a fresh clone",
    ("CONTRIBUTING.md", ".venv/bin/python scripts/interop.py --install comp"): ".ci/run runs it",
    ("CONTRIBUTING.md", ".venv/bin/python scripts/interop.py --install triton"): ".ci/run runs it",
    ("benchmarks/README.md", "python benchmarks/accuracy.py"): "measures for hours",
    ("docs/command-line.md", "quark evaluate OUT --original MODEL --tasks"): (
        "needs lm-evaluation-harness; tests/unit/evaluation/test_tasks.py runs such tasks"
    ),
    ("docs/large-models.md", "quark quantize --model_dir MODEL --output_dir OUT --quant_scheme "
     "int4_wo_128 --quant_algo gptq --device"): "needs several GPUs; tests/device stands for them",
    ("docs/large-models.md", "OMP_NUM_THREADS=1"): (
        "its first command has to be killed; tests/unit/cli/test_torchrun.py kills such runs"
    ),
    ("docs/other-models.md", "from quark.torch import export_pipeline"): (
        "needs diffusers; tests/unit/test_diffusion.py"
    ),
    ("docs/other-models.md", "from diffusers"): (
        "needs diffusers; tests/unit/export/test_diffusers_loading.py"
    ),
    ("docs/serve.md", "python3 -m venv"): "installs; .ci/run does the same in a fresh clone",
    ("docs/serve.md", "vllm serve"): "needs vLLM",
    ("docs/serve.md", "curl"): "needs a server",
    ("docs/serve.md", "python -m sglang"): "needs SGLang",
    ("docs/serve.md", "llama-cli"): "needs llama.cpp",
    ("docs/serve.md", "import xllamacpp"): "needs xllamacpp",
    ("docs/training.md", "import torch"): "test_training_document.py runs it",
    ("docs/training.md", "import copy"): "test_training_document.py runs it",
}  # fmt: skip

# Document -> what stands in its blocks, and what runs instead.
SUBSTITUTED = {
    "docs/algorithms.md": {"--nproc_per_node 4": "--nproc_per_node 2", "llama-svdquant": "INT4"},
    "docs/command-line.md": {
        "python quantize_quark.py": f"python {ROOT}/examples/torch/language_modeling/llm_ptq/"
        "quantize_quark.py --dataset calibration.txt --skip_evaluation",  # no network
        " --tasks gsm8k,wikitext": "",
        "--output_dir OUT --quant_scheme w_fp8": "--output_dir SECOND --quant_scheme w_fp8",
    },
    "docs/other-models.md": {'"MODEL"': '"LLAVA"', '"IMAGES"': '"LLAVA"'},
    "docs/large-models.md": {'"cuda:0", "cuda:1"': '"cpu"', "cuda:0": "cpu"},
    "docs/report.md": {"--dataset wikitext": "--dataset test.txt"},
    "docs/runtime.md": {'"OUT"': '"INT4"'},
    "docs/tutorial.md": {  # less text: the model runs on one thread
        "--quant_scheme uint4_wo_32": "--quant_scheme uint4_wo_32 --num_eval_data 4",
        "--num_calib_data 32": "--num_calib_data 8",
        "quark compare": "quark compare --limit 4 --new_tokens 8",
    },
}
INSTALLS = re.compile(r"^(pip install|source ).*$", re.MULTILINE)  # the environment has it


class Block(NamedTuple):
    """A block of a document.

    Attributes:
        document: Path below the root.
        language: ``bash`` or ``python``.
        text: Its lines, as they are printed.
    """

    document: str
    language: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why the block is not run here; None if it is."""
        return next((why for key, why in NOT_RUN.items() if self.is_at(*key)), None)

    def is_at(self, document: str, start: str) -> bool:
        """Whether the block is the one of a document that begins with a text."""
        return self.document == document and self.text.startswith(start)

    @property
    def code(self) -> str:
        """What runs instead of the text."""
        code = self.text
        for before, after in SUBSTITUTED.get(self.document, {}).items():
            code = code.replace(before, after)
        return INSTALLS.sub(":", code) if self.language == "bash" else code


def all_blocks() -> list[Block]:
    """Return the blocks of all documents, in order."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    files += [ROOT / "benchmarks/README.md", ROOT / "examples/README.md"]
    return [
        Block(file.relative_to(ROOT).as_posix(), *match.groups())
        for file in files
        for match in BLOCK.finditer(file.read_text(encoding="utf-8"))
    ]


def blocks_to_run(language: str) -> dict[str, list[Block]]:
    """Return the blocks of a language that run here, by their documents."""
    chosen: dict[str, list[Block]] = {}
    for block in all_blocks():
        if block.language == language and block.reason is None:
            chosen.setdefault(block.document, []).append(block)
    return chosen
