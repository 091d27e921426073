"""Tasks of the harness: what it is asked, what is made of its figures, and its own figures."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from quark.demo.text import model_directory
from quark.torch.evaluation.tasks import Score, Tasks
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme

FIGURES = {
    "results": {
        "questions": {
            "alias": "questions",
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": "N/A",
            "sample_len": 4,
        }
    },
    "groups": {"all": {"acc,none": 1}},
}


@pytest.fixture
def harness(monkeypatch):
    """A library of two tasks that says always the same; records what it is asked."""
    seen = SimpleNamespace()

    class TaskManager:
        def __init__(self, include_path):
            seen.include_path = include_path

        def match_tasks(self, names):
            return [name for name in names if name in ("questions", "unreachable", "broken")]

        def load(self, names):
            if "unreachable" in names:
                raise ConnectionError("offline")
            if "broken" in names:
                raise KeyError("field")

    def wrap(pretrained, **options):
        pretrained.tie_weights()
        seen.options = options
        return pretrained

    def simple_evaluate(**given):
        seen.given = given
        return FIGURES

    library, tasks, models = (ModuleType(name) for name in ("lm_eval", "t", "m"))
    library.simple_evaluate, tasks.TaskManager, models.HFLM = simple_evaluate, TaskManager, wrap
    monkeypatch.setitem(sys.modules, "lm_eval", library)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    monkeypatch.setitem(sys.modules, "lm_eval.models", ModuleType("lm_eval.models"))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", models)
    return seen


def test_figures_by_task_and_metric(harness, build):
    tasks = Tasks(["questions"], "files", num_fewshot=2, limit=3, apply_chat_template=True)
    scores = tasks.score(build(), "tokenizer", "auto", 16)
    assert scores == {
        "questions": {
            "acc": Score(0.25, 0.125),
            "exact_match (strict-match)": Score(0.5, None),
        },
        "all": {"acc": Score(1.0, None)},
    }
    assert harness.include_path == "files"
    asked = {"tasks": ["questions"], "num_fewshot": 2, "limit": 3, "apply_chat_template": True}
    assert {name: harness.given[name] for name in asked} == asked
    assert (harness.options["batch_size"], harness.options["max_batch_size"]) == ("auto", 16)


def test_a_quantized_head_stays_what_it_is(harness, build):
    model = build("tied")
    config = Config(global_quant_config=scheme("int4_wo_32"))
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model))
    head = model.lm_head.weight.clone()
    assert not torch.equal(head, model.model.embed_tokens.weight)
    Tasks(["questions"]).score(model, None)
    assert torch.equal(model.lm_head.weight, head)
    assert "tie_weights" not in vars(model)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("unknown", ValueError, "there is no task 'unknown'"),
        ("unreachable", FileNotFoundError, "offline.*include_path"),
        ("broken", ValueError, "cannot be loaded: 'field'"),
    ],
)
def test_what_is_missing_is_said_before_any_model(name, kind, said, harness):
    with pytest.raises(kind, match=said):
        Tasks(["questions", name])


def test_without_the_harness(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match="pip install lm_eval"):
        Tasks(["gsm8k"])


CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Return the"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


@pytest.mark.client("lm_eval")
def test_the_harness_itself(tmp_path, monkeypatch):
    """One question with either answer: that which is a word of docstrings is the model's."""
    import datasets
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(model_directory()).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_directory())
    rows = [{"choices": ["value", "xylophone"], "answer": answer} for answer in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(path=tmp_path / "rows.jsonl"))
    scores = Tasks(["choices"], tmp_path).score(model, tokenizer, batch_size=2)
    assert scores["choices"]["acc"].value == 0.5  # one of two opposite answers is right
    assert Tasks(["choices"], tmp_path, limit=1).score(model, tokenizer)["choices"]["acc"][0] == 1
