"""Data sets by name: where they come from, which part is for what, and what text they give."""

import datasets
import pytest

from quark.torch.evaluation.datasets import NAMED_SETS, named_documents, split_shares
from quark.torch.evaluation.documents import load_documents

RECORDS = {
    "text": ["one", "two"],
    "article": ["news", "more news"],
    "response": ["answer", "another"],
    "messages": [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}],
        [{"role": "user", "content": None}],
    ],
}


@pytest.fixture
def asked(monkeypatch):
    """Let the Hub have the same records in every data set; what it was asked for."""
    asked = []

    def load_dataset(name, configuration, split):
        asked.append((name, split.partition("[")[0]))
        return [dict(zip(RECORDS, row, strict=True)) for row in zip(*RECORDS.values(), strict=True)]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize(
    ("name", "source", "splits", "documents"),
    [
        ("pileval", "mit-han-lab/pile-val-backup", ("validation", "validation"), ["one", "two"]),
        ("wikitext", "Salesforce/wikitext", ("train", "test"), ["one\n\ntwo"]),
        ("cnn_dailymail", "abisee/cnn_dailymail", ("train", "test"), ["news", "more news"]),
        (
            "HuggingFaceH4/ultrachat_200k",
            "HuggingFaceH4/ultrachat_200k",
            ("train_sft", "test_sft"),
            ["Why?\n\nBecause.", ""],
        ),
        ("HelpSteer", "nvidia/HelpSteer", ("train", "validation"), ["answer", "another"]),
    ],
)
def test_a_named_set(name, source, splits, documents, asked):
    assert named_documents(name, held_out=False) == documents
    assert named_documents(name, held_out=True) == documents
    assert asked == [(source, split) for split in splits]


@pytest.mark.parametrize("name", NAMED_SETS)
def test_nothing_is_both_calibrated_and_evaluated_on(name):
    chosen = NAMED_SETS[name]
    assert chosen.calibration != chosen.evaluation


def test_benchmarks_take_the_same_text(asked):
    for name in ("pileval", "wikitext"):
        suffix = {"pileval": "awq", "wikitext": "gptq"}[name]
        assert NAMED_SETS[name] == NAMED_SETS[f"{name}_for_{suffix}_benchmark"]


def test_a_directory_of_that_name_comes_first(tmp_path, monkeypatch, asked):
    monkeypatch.chdir(tmp_path)
    datasets.Dataset.from_list([{"text": "local"}]).save_to_disk("wikitext")
    assert named_documents("wikitext", held_out=True) == ["local"]
    assert asked == []


def test_other_names_are_files_and_data_sets(tmp_path, asked):
    for name in ("a.txt", "b.md"):
        (tmp_path / name).write_text("text")
        assert named_documents(str(tmp_path / name), held_out=True) == ["text"]
    with pytest.raises(ValueError, match=r"pictures.*choose one of pileval"):
        named_documents("ScienceQA", held_out=False)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_a_directory_of_files(suffix, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "folder"
    folder.mkdir()
    table = datasets.Dataset.from_list([{"text": "first"}, {"text": "second"}])
    if suffix == "txt":
        (folder / "a.txt").write_text("first\nsecond\n")
    elif suffix == "jsonl":
        table.to_json(folder / "a.jsonl")
    else:
        table.to_parquet(folder / "a.parquet")
    assert load_documents(str(folder)) == ["first", "second"]


@pytest.mark.parametrize(
    ("source", "shares"),
    [
        ("my.txt", [("my.txt", 1.0)]),
        ("Salesforce/wikitext:wikitext-2-raw-v1", [("Salesforce/wikitext:wikitext-2-raw-v1", 1.0)]),
        ("pileval:0.7,my.txt:0.3", [("pileval", 0.7), ("my.txt", 0.3)]),
        ("a:.25, b/c:d:0.75", [("a", 0.25), ("b/c:d", 0.75)]),
        ("a:1.0", [("a", 1.0)]),
    ],
)
def test_shares_of_a_mixture(source, shares):
    assert split_shares(source) == shares


@pytest.mark.parametrize("source", ["a:0.7,b:0.2", "a:0.7,b", "a:0.0,b:1.0", "a:0.6,b:0.6"])
def test_wrong_shares(source):
    with pytest.raises(ValueError, match="shares that add up to 1"):
        split_shares(source)


def test_a_file_is_one_source(tmp_path):
    path = tmp_path / "a:0.5,b"
    path.touch()
    assert split_shares(str(path)) == [(str(path), 1.0)]
