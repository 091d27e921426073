"""What ``quantize`` and ``evaluate`` measure: text, contexts, tasks, and the file of figures."""

import csv
import json

import pytest
import torch

from quark.cli import console
from quark.torch.evaluation import tasks
from quark.torch.evaluation.tasks import Score


@pytest.fixture
def harness(monkeypatch):
    """Tasks whose score is a logit, so that models differ; what was asked of them."""
    asked = []

    class Tasks:
        def __init__(self, names, *options):
            asked.append((names, *options))
            if "gone" in names:
                raise ValueError("there is no task 'gone'")
            self.names = names

        def score(self, model, tokenizer, *sizes):
            asked.append((type(tokenizer).__name__ != "NoneType", *sizes))
            found = model(torch.ones(1, 4, dtype=torch.int64)).logits[0, 0, 0].item()
            return {name: {"acc": Score(found, None)} for name in self.names}

    monkeypatch.setattr(tasks, "Tasks", Tasks)
    return asked


@pytest.fixture
def reference(model_dir, text):
    """Perplexity of the model on the text after a context, window by window, token by token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.evaluation.documents import load_documents
    from quark.torch.evaluation.perplexity import token_windows

    def reference(context, sample, count):
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        row = token_windows(load_documents(text), tokenizer, 1).flatten()
        losses = []
        for start in range(0, count * sample, sample):
            window = row[start : start + context + sample]
            with torch.no_grad():
                logits = model(window[None]).logits[0].log_softmax(-1)
            losses += [-logits[i - 1, window[i]] for i in range(context, context + sample)]
        return torch.stack(losses).mean().exp().item()

    return reference


def figures_of(path):
    with (path / "evaluation_metrics.csv").open(newline="") as file:
        return {name: float(value) for name, value in csv.reader(file)}


def test_perplexity_after_a_context(quark, reference, model_dir, text, tmp_path):
    sizes = {"context": 24, "sample": 8, "patch": 3}
    flags = [f"--ppl_eval_for_kv_cache_{name}_size={size}" for name, size in sizes.items()]
    place = ["--model_dir", model_dir, "--skip_quantization", "--eval_data", text]
    flags += ["--use_ppl_eval_for_kv_cache", "--save_metrics_to_csv"]
    result = quark("quantize", *place, *flags, "--metrics_output_dir", tmp_path)
    assert result.exit_code == 0, result.output
    found = figures_of(tmp_path)
    assert found == {"Perplexity": pytest.approx(reference(24, 8, 3), rel=1e-5)}
    assert f"{found['Perplexity']:.2f}" in result.stdout


def test_windows_of_another_length(quark, model_dir, text, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from quark.torch.evaluation.documents import load_documents
    from quark.torch.evaluation.perplexity import perplexity, token_windows

    place = ["--model_dir", model_dir, "--skip_quantization", "--eval_data", text]
    flags = ["--eval_seq_len", 16, "--num_eval_data", -1, "--eval_batch_size", "auto"]
    flags += ["--save_metrics_to_csv", "--metrics_output_dir", tmp_path]
    assert quark("quantize", *place, *flags).exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    windows = token_windows(load_documents(text), tokenizer, 16)
    expected = perplexity(AutoModelForCausalLM.from_pretrained(model_dir), windows)
    assert figures_of(tmp_path)["Perplexity"] == expected


def test_tasks_of_the_quantized_model(quantize, quark, harness, model_dir, text, tmp_path):
    place = ["--model_dir", model_dir, "--output_dir", tmp_path / "out", "--eval_data", text]
    flags = ["--tasks", "one, two", "--num_fewshot", 5, "--apply_chat_template"]
    flags += ["--include_path", tmp_path, "--num_eval_data", 2]
    flags += ["--eval_batch_size", "auto:2", "--max_eval_batch_size", 4]
    result = quark("quantize", *place, "--quant_scheme", "int8_wo", *flags)
    assert result.exit_code == 0, result.output
    assert harness == [(["one", "two"], str(tmp_path), 5, 2, True), (True, "auto:2", 4)]
    assert [line.split()[:2] for line in result.stdout.splitlines() if " acc " in line] == [
        ["one", "acc"],
        ["two", "acc"],
    ]


def test_tasks_of_two_models(quark, quantize, harness, model_dir, text):
    path, _ = quantize("--quant_scheme", "int8_wo", "--exclude_layers")
    flags = ["--original", model_dir, "--dataset", text, "--tasks", "one", "--task_limit", 3]
    data = json.loads(quark("evaluate", path, *flags, "--json").stdout)
    scores = [row["tasks"]["one"]["acc"]["value"] for row in data["models"]]
    assert scores[0] != scores[1]
    assert harness[0] == (["one"], None, None, 3, False)
    shown = quark("evaluate", path, *flags).stdout
    for score in scores:
        assert f"{score:.4f}" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "gone"], "there is no task 'gone'"),
        (["--tasks", "one", "--include_path", "gone"], "there is no directory gone"),
        (["--tasks", ","], "expected names of tasks"),
        (["--num_fewshot", 2], "needs --tasks"),
        (["--eval_batch_size", "0"], "expected N, auto or auto:N, not 0"),
        (["--eval_seq_len", 65], "--eval_seq_len: 65 is more than the 64 tokens"),
        (["--use_ppl_eval_for_kv_cache"], "1536 is more than the 64 tokens"),
        (
            [
                *("--use_ppl_eval_for_kv_cache", "--ppl_eval_for_kv_cache_context_size", 60),
                *("--ppl_eval_for_kv_cache_sample_size", 4, "--eval_data", "few.txt"),
            ],
            "fewer than one window of 64",
        ),
        (["--skip_evaluation", "--tasks", "one"], "conflicts with --skip_evaluation"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_refusals(flags, said, refused, harness, model_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.txt").write_text("A few words.")
    place = ["--model_dir", model_dir, "--quant_scheme", "int8_wo"]
    assert said in refused("quantize", *place, *flags)


@pytest.mark.parametrize("flag", [("num_fewshot", 0), ("task_limit", 3), ("apply_chat_template",)])
def test_flags_of_tasks_without_tasks(flag, refused, model_dir):
    flags = [f"--{flag[0]}", *flag[1:]]
    assert f"--{flag[0]}: needs --tasks" in refused("evaluate", model_dir, *flags)
    if flag[0] != "task_limit":
        assert f"--{flag[0]}: needs --tasks" in refused("compare", model_dir, "other", *flags)
        place = ["--model_dir", model_dir, "--quant_scheme", "int8_wo"]
        assert f"--{flag[0]}: needs --tasks" in refused("quantize", *place, *flags)


@pytest.mark.parametrize(
    ("value", "text"), [(9.9999, "+0.0 %"), (10.0001, "+0.0 %"), (9.9, "-1.0 %")]
)
def test_a_change_of_nothing_has_no_minus(value, text):
    assert console.format_change(value, 10.0) == text
