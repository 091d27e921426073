"""Documents from files, saved datasets and the ``datasets`` library."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quark.torch.evaluation import hub_access
from quark.torch.evaluation.documents import load_documents


class TestLoadDocuments:
    def test_text(self, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text("naïve\n\ntext\n", encoding="utf-8")
        (tmp_path / "many.txt").write_text("first\n\0second\0 \0", encoding="utf-8")
        assert load_documents(tmp_path / "one.txt") == ["naïve\n\ntext\n"]
        assert load_documents(str(tmp_path / "many.txt")) == ["first\n", "second"]

    def test_errors_without_the_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        (tmp_path / "empty.txt").write_text(" \n")
        (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
        (tmp_path / "image.png").write_bytes(b"")
        (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
        for name, kind, message in [
            ("empty.txt", ValueError, "no text"),
            ("latin.txt", ValueError, "UTF-8"),
            ("image.png", ValueError, r"\.png.*\.parquet"),
            ("rows.jsonl", ImportError, "pip install datasets"),
        ]:
            with pytest.raises(kind, match=message):
                load_documents(tmp_path / name)
        for missing in [tmp_path / "none", "none.txt", "some/where/else", str(tmp_path / "none")]:
            with pytest.raises(FileNotFoundError, match=r"no file or directory"):
                load_documents(missing)
        with pytest.raises(ImportError, match=r"pip install datasets"):
            load_documents("owner/name")
        with pytest.raises(ValueError, match=r"no split 'test'"):
            load_documents(tmp_path / "empty.txt", split="test")

    def test_records(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        rows = [{"text": "one\ntwo", "n": 1}, {"text": None, "n": 2}, {"text": "é" * 200, "n": 3}]
        table = datasets.Dataset.from_list(rows)
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        table.to_csv(str(tmp_path / "rows.csv"))
        table.to_parquet(str(tmp_path / "rows.parquet"))
        for suffix in ("jsonl", "json", "csv", "parquet"):
            documents = load_documents(tmp_path / f"rows.{suffix}")
            assert documents == ["one\ntwo", "", "é" * 200], suffix
        with pytest.raises(ValueError, match=r"no field 'body'; its fields are text, n"):
            load_documents(tmp_path / "rows.jsonl", text_field="body")
        with pytest.raises(ValueError, match=r"holds int"):
            load_documents(tmp_path / "rows.jsonl", text_field="n")
        (tmp_path / "broken.json").write_text('{"text": ')
        with pytest.raises(ValueError, match=r"broken.json cannot be read"):
            load_documents(tmp_path / "broken.json")

    def test_saved_directories(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        parts = {
            name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "held-out")
        }
        parts["train"].save_to_disk(str(tmp_path / "one"))
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "two"))
        assert load_documents(tmp_path / "one") == ["train"]
        assert load_documents(tmp_path / "two", split="held-out") == ["held-out"]
        with pytest.raises(ValueError, match=r"splits train, held-out; name one"):
            load_documents(tmp_path / "two")
        with pytest.raises(ValueError, match=r"there is no 'test'"):
            load_documents(tmp_path / "two", split="test")

    def test_dataset_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(name: str, configuration: str | None, split: str) -> list[dict[str, str]]:
            asked.append((name, configuration, split))
            return [{"text": "a"}]

        def unreachable(*_: object, **__: object) -> None:
            raise ConnectionError("offline")

        library = SimpleNamespace(
            load_dataset=load_dataset, get_dataset_split_names=lambda *_: ["validation"]
        )
        monkeypatch.setitem(sys.modules, "datasets", library)
        monkeypatch.setattr(hub_access, "find_obstacle", lambda: None)
        assert load_documents("owner/name:small") == ["a"]
        assert load_documents("name", split="test[:9]") == ["a"]
        assert asked == [("owner/name", "small", "validation"), ("name", None, "test[:9]")]
        library.load_dataset = unreachable
        with pytest.raises(FileNotFoundError, match=r"'owner/name' is no file.*offline"):
            load_documents("owner/name")
