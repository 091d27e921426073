"""``quark evaluate``: the same figures as the library's, original beside quantized."""

import json

import pytest
import torch
import typer

from quark.torch.pipeline.memory_limit import MemoryLimit


@pytest.fixture
def reference(text):
    """Perplexity of a directory by the library itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.evaluation.documents import load_documents
    from quark.torch.evaluation.perplexity import perplexity, token_windows

    def reference(path, length, limit):
        tokenizer = AutoTokenizer.from_pretrained(path)
        windows = token_windows(load_documents(text), tokenizer, length, limit)
        return perplexity(AutoModelForCausalLM.from_pretrained(path), windows)

    return reference


def test_two_models(quark, quantize, model_dir, text, reference):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    flags = ["--original", model_dir, "--dataset", text, "--seq_len", 32, "--limit", 3]
    result = quark("evaluate", path, *flags, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert (data["windows"], data["seq_len"], data["text"]) == (3, 32, str(text))
    original, quantized = data["models"]
    assert original["perplexity"] == reference(model_dir, 32, 3)
    assert quantized["perplexity"] == reference(path, 32, 3)
    assert data["change"] == quantized["perplexity"] / original["perplexity"] - 1 != 0
    assert (original["bits_per_weight"], quantized["bits_per_weight"]) == (None, 4 + 36 / 32)
    assert quantized["bytes"] == (path / "model.safetensors").stat().st_size
    table = quark("evaluate", path, *flags).stdout
    for row in data["models"]:
        assert f"{row['perplexity']:.2f}" in table


def test_errors_are_those_over_windows(quark, quantize, model_dir, text):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.evaluation.documents import load_documents
    from quark.torch.evaluation.perplexity import token_windows

    path, _ = quantize("--quant_scheme", "int4_wo_32")
    flags = ["--original", model_dir, "--dataset", text, "--seq_len", 32, "--limit", 5]
    data = json.loads(quark("evaluate", path, *flags, "--json").stdout)
    windows = token_windows(
        load_documents(text), AutoTokenizer.from_pretrained(model_dir), 32, 5
    ).to(torch.int64)
    losses = []
    for directory in (model_dir, path):
        model = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            rows = [float(model(row[None], labels=row[None]).loss) for row in windows]
        losses.append(torch.tensor(rows, dtype=torch.float64))
    errors = [float(x.std() / 5**0.5) for x in (losses[0], losses[1], losses[1] - losses[0])]
    original, quantized = data["models"]
    assert original["error"] == pytest.approx(errors[0] * original["perplexity"], rel=1e-4)
    assert quantized["error"] == pytest.approx(errors[1] * quantized["perplexity"], rel=1e-4)
    expected = errors[2] * quantized["perplexity"] / original["perplexity"]
    assert data["change_error"] == pytest.approx(expected, rel=1e-3)
    table = quark("evaluate", path, *flags).stdout
    assert f"{original['perplexity']:.2f} ± {original['error']:.2f}" in table
    assert f" % ± {100 * data['change_error']:.1f} %" in table


def test_one_model(quark, model_dir, text):
    result = quark("evaluate", model_dir, "--dataset", text, "--json")
    data = json.loads(result.stdout)
    assert [row["model"] for row in data["models"]] == [str(model_dir)]
    assert (data["change"], data["change_error"]) == (None, None)
    assert data["seq_len"] == 64  # all that the model takes


def test_a_limit_of_zero_is_none(quark, model_dir, text):
    def windows(limit):
        flags = ["--dataset", text, "--seq_len", 8, "--limit", limit]
        return json.loads(quark("evaluate", model_dir, *flags, "--json").stdout)["windows"]

    assert windows(5) == 5
    assert windows(0) > 16


def test_runtimes(quark, quantize, text):
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    flags = ["--dataset", text, "--seq_len", 32, "--limit", 3, "--json"]

    def perplexity(*runtime):
        result = quark("evaluate", path, *flags, *runtime)
        return json.loads(result.stdout)["models"][0]["perplexity"]

    exact, fast = perplexity(), perplexity("--runtime", "fast")
    assert perplexity("--runtime", "unpacked") == exact
    assert fast == pytest.approx(exact, rel=1e-2)


def test_the_native_format(quark, quantize, text):
    """Transformers cannot read it; its perplexity is that of the same model in safetensors."""
    flags = ["--quant_scheme", "int8_wo"]
    native, _ = quantize(*flags, "--model_export", "quark_format")
    other, _ = quantize(*flags)
    result = quark("evaluate", native, "--original", other, "--dataset", text, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["change"] == 0


def test_the_embedded_text(quark, model_dir):
    result = quark("evaluate", model_dir, "--limit", 1, "--json")
    assert "docstrings" in json.loads(result.stdout)["text"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--original", "gone"], "there is no directory gone"),
        (["--dataset", "gone.txt"], "no file or directory gone.txt"),
        (["--seq_len", "65"], "more than the 64 tokens"),
        (["--limit", "-1"], "--limit"),
        (["--runtime", "quick"], "give one of exact, auto, fast, compiled, unpacked"),
        (["--runtime", "fast", "--max_memory", "8GB"], "does not go with --max_memory"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refusals(flags, said, refused, model_dir):
    assert said in refused("evaluate", model_dir, *flags)


def test_too_little_memory_is_refused_before_work(quark, quantize, model_dir, text, monkeypatch):
    """Of two models, the second one has too little room: neither is evaluated."""
    path, _ = quantize("--quant_scheme", "int4_wo_32")
    rooms = iter([10**9, 3 * 10**5])
    monkeypatch.setattr(
        "quark.torch.export.checkpoint.streamed_model.divide_memory",
        lambda *_: MemoryLimit(10**6, 10**6, next(rooms)),
    )
    monkeypatch.setattr("quark.torch.evaluation.perplexity.perplexity", None)
    flags = ["--original", model_dir, "--dataset", text, "--seq_len", 32, "--limit", 3]
    result = quark("evaluate", path, *flags, "--max_memory", "1TB")
    assert result.exit_code == 1
    # Embedding of 2048 x 32 in float32; logits of 3 windows, and logarithms of one of them.
    needed = 2048 * 32 * 4 + 2048 * 32 * (3 * 2 + 4)
    assert f"takes at least {needed / 1e6:.0f} MB, but 0 MB are left" in result.stderr
    assert "Give at least 1 MB more." in result.stderr


def test_without_tokenizer(refused, bert_dir):
    assert "has no tokenizer" in refused("evaluate", bert_dir)


def test_sources_are_mixed_by_their_shares(model_dir, text, tmp_path):
    from quark.cli.models import load_tokenizer, text_windows

    other = tmp_path / "other.txt"
    other.write_text("Another text altogether, of no use. " * 60, encoding="utf-8")
    tokenizer = load_tokenizer(model_dir, "model")

    def windows(source, limit):
        return text_windows(source, "--dataset", tokenizer, 16, limit, True)

    mixed = windows(f"{text}:0.7,{other}:0.3", 10)
    assert torch.equal(mixed, torch.cat([windows(str(text), 7), windows(str(other), 3)]))
    for source, limit in ((f"{text}:0.7,{other}:0.3", 0), (f"{text}:0.9,{other}:0.1", 2)):
        with pytest.raises(typer.BadParameter, match=r"mixes sources|too few"):
            windows(source, limit)
