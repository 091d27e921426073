"""Scripts of calibration and evaluation texts, in summaries, checkpoints and reports."""

import json
import shutil

import pytest
import torch

from quark.cli.coverage import Coverage, scripts_of
from quark.torch.statistics.files import load_statistics

ENGLISH = "Return the value of the key if it is in the file else raise an exception. " * 20
RUSSIAN = "Верните значение ключа. " * 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A text of Latin letters, and one with Cyrillic letters too."""
    path = tmp_path_factory.mktemp("texts")
    (path / "latin.txt").write_text(ENGLISH, encoding="utf-8")
    (path / "both.txt").write_text(RUSSIAN + ENGLISH, encoding="utf-8")
    return path


def test_scripts_of_batches():
    class Tokenizer:
        def decode(self, row, skip_special_tokens):
            assert skip_special_tokens
            return "".join("aяж"[index] for index in row)

    rows = torch.tensor([[0, 1], [0, 0]])
    expected = {"Latin": 3 / 4, "Cyrillic": 1 / 4}
    assert scripts_of(Tokenizer(), [rows]) == expected
    assert scripts_of(Tokenizer(), [{"input_ids": rows}, {"pixel_values": rows}]) == expected
    assert scripts_of(None, [rows]) == scripts_of(Tokenizer(), None) == {}
    assert Coverage(expected).rows() == {"letters calibrated": "Latin 75.0 %, Cyrillic 25.0 %"}


def test_a_script_that_calibration_lacks(quark, model_dir, texts, tmp_path):
    out = tmp_path / "out"
    flags = ["--model_dir", model_dir, "--output_dir", out, "--quant_scheme", "int8"]
    data = ["--dataset", texts / "latin.txt", "--eval_data", texts / "both.txt", "--seq_len", 32]
    done = quark("quantize", *flags, *data)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "The evaluation text has scripts that the calibration text lacks: Cyrillic (" in said
    assert "letters calibrated Latin 100.0 %" in said
    assert "letters evaluated " in said
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["calibration_scripts"] == "Latin 1.0000"
    assert "| letters calibrated | Latin 100.0 % |" in (out / "README.md").read_text("utf-8")
    page = tmp_path / "page.html"
    done = quark("report", out, "--dataset", texts / "both.txt", "--output", page, "--seq_len", 32)
    assert done.exit_code == 0, done.output
    assert "the calibration text lacks: Cyrillic" in " ".join(done.output.split())
    numbers = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))["text"]
    assert numbers["calibrated"] == {"Latin": 1.0}
    assert numbers["scripts"].keys() == {"Cyrillic", "Latin"}
    assert "of the calibration text: Latin 100.0 %" in page.read_text(encoding="utf-8")


def test_a_mixture_of_chats_and_text(quark, model_dir, texts, tmp_path):
    """Messages go through the chat template, and count in the coverage of ``collect``."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps([{"role": "user", "content": RUSSIAN}]), encoding="utf-8")
    mixture = f"{texts / 'latin.txt'}:0.5,{chats}:0.5"
    flags = ["--seq_len", 32, "--num_calib_data", 4, "--probes", 0, "--json"]
    command = ["collect", "--model_dir", model, "--dataset", mixture, *flags]
    done = quark(*command, "--output_dir", tmp_path / "a")
    assert done.exit_code == 2
    assert "has no chat template, which messages need" in done.output
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = quark(*command, "--output_dir", tmp_path / "b")
    assert done.exit_code == 0, done.output
    shares = json.loads(done.stdout)["calibration_scripts"]
    assert shares.keys() == {"Latin", "Cyrillic"}
    assert all(share > 0.1 for share in shares.values())


def test_statistics_know_their_letters(quark, model_dir, texts, tmp_path):
    """A run with statistics tells the scripts of the text that they were collected on."""
    for name in ("latin", "both"):
        data = ["--dataset", texts / f"{name}.txt", "--seq_len", 32, "--num_calib_data", 2]
        place = ["--output_dir", tmp_path / name]
        done = quark("collect", "--model_dir", model_dir, *place, *data, "--probes", 0)
        assert done.exit_code == 0, done.output
    merged = tmp_path / "merged"
    done = quark("merge", tmp_path / "latin", tmp_path / "both", "--output_dir", merged, "--json")
    shares = json.loads(done.stdout)["calibration_scripts"]
    counts = [
        json.loads((tmp_path / name / "statistics.json").read_text("utf-8"))["letters"]
        for name in ("latin", "both")
    ]
    total = sum(sum(count.values()) for count in counts)
    assert shares["Cyrillic"] == counts[1]["Cyrillic"] / total
    out = tmp_path / "out"
    flags = ["--model_dir", model_dir, "--output_dir", out, "--quant_scheme", "int8"]
    data = ["--statistics", tmp_path / "latin", "--eval_data", texts / "both.txt", "--seq_len", 32]
    done = quark("quantize", *flags, *data)
    assert done.exit_code == 0, done.output
    assert "the calibration text lacks: Cyrillic (" in " ".join(done.output.split())
    assert "| letters calibrated | Latin 100.0 % |" in (out / "README.md").read_text("utf-8")


def test_statistics_without_letters_are_read(quark, model_dir, texts, tmp_path):
    """Those of earlier versions have none."""
    data = ["--dataset", texts / "latin.txt", "--seq_len", 32, "--num_calib_data", 2]
    place = tmp_path / "statistics"
    assert quark("collect", "--model_dir", model_dir, "--output_dir", place, *data).exit_code == 0
    header = json.loads((place / "statistics.json").read_text("utf-8"))
    del header["letters"]
    (place / "statistics.json").write_text(json.dumps(header))
    assert load_statistics(place).letters == {}
    header["letters"] = {"Latin": -1}
    (place / "statistics.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"letters\.Latin is negative"):
        load_statistics(place)
