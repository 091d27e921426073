"""A small random model with a tokenizer, some text, and a way to call the command line."""

import gc
from functools import cache

import pytest
import torch
import typer
from typer.testing import CliRunner

from quark.cli import console
from quark.cli.main import app
from quark.cli.quantize import job, plan
from quark.demo.text import model_directory

SIZES = {
    "vocab_size": 2048,  # that of the tokenizer
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


_speeds = {}  # of this machine, by type and device


def probe_once(request, model, device, probe=plan._probe_machine):
    key = next(model.parameters()).dtype, device
    if key not in _speeds:
        _speeds[key] = probe(request, model, device)
    return _speeds[key]


@pytest.fixture(scope="module", autouse=True)
def brief():
    """Measure the machine once and keep garbage; each is a tenth of the time of commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_probe_machine", probe_once)
        patch.setattr(plan, "PROBE", 1e-3)
        patch.setattr(plan, "GLANCE", 1e-3)
        patch.setattr(gc, "collect", lambda: 0)
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A Llama in float32."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory):
    """A decoder of another kind: no lm_head, no k_proj, and no tokenizer."""
    from transformers import BertConfig, BertLMHeadModel

    path = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def mixtral_dir(tmp_path_factory):
    """A model of four experts a layer, two of which take each token."""
    from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

    path = tmp_path_factory.mktemp("models") / "mixtral"
    torch.manual_seed(0)
    several = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    MixtralForCausalLM(MixtralConfig(**SIZES, **several)).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of a few hundred tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = "Return the value of the key if it is in the file else raise an exception. "
    path.write_text("".join(f"{i} {words}" for i in range(40)), encoding="utf-8")
    return path


_make_command = cache(typer.main.get_command)  # 50 ms; CliRunner makes one for each call


@pytest.fixture
def quark(monkeypatch):
    """Call the command line; returns its exit code, what it printed and what it complained."""
    monkeypatch.setattr(typer.testing, "_get_command", _make_command)
    monkeypatch.setattr(console.out, "width", 120)  # whatever terminal the tests run in
    runner = CliRunner()

    def quark(*arguments):
        return runner.invoke(app, [str(argument) for argument in arguments])

    return quark


@pytest.fixture
def quantize(quark, model_dir, text, tmp_path):
    """Quantize the model and return the directory, and what was printed."""

    def quantize(*flags, model=model_dir, evaluated=False):
        path = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        flags = [*flags, "--dataset", text]
        flags += ["--eval_data", text, "--num_eval_data", 2] if evaluated else ["--skip_evaluation"]
        result = quark("quantize", "--model_dir", model, "--output_dir", path, *flags)
        assert result.exit_code == 0, result.output
        return path, result.stdout

    return quantize


@pytest.fixture
def refused(quark):
    """Call the command line, which must say in one line why it does not do it, after warnings."""

    def refused(*arguments, code=2):
        result = quark(*arguments)
        assert result.exit_code == code, result.output
        lines = [line for line in result.stderr.splitlines() if not line.endswith(" s")]
        lines = [line for line in lines if not line.startswith("warning: ")]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        return lines[0]

    return refused


@pytest.fixture
def request_of(quark, monkeypatch):
    """What the flags of a call come to, without the work."""

    def request_of(*flags):
        seen = []
        monkeypatch.setattr(job, "run", seen.append)
        result = quark("quantize", "--model_dir", "in", *flags)
        assert result.exit_code == 0, result.output
        return seen[0]

    return request_of
