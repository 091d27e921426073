"""Text that a model writes, and a calibration with it."""

import json

import pytest

SHORT = ["--num_samples", 10, "--seq_len", 12]


@pytest.fixture
def sample(quark, model_dir, tmp_path):
    """Let the model write a file, and return its path and the result of the call."""

    def sample(*flags, name="sampled.jsonl", model=model_dir):
        path = tmp_path / name
        return path, quark("sample", "--model_dir", model, "--output", path, *SHORT, *flags)

    return sample


def texts_of(path):
    return [json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()]


def test_a_text_of_the_model_calibrates_it(sample, quark, model_dir, text, tmp_path):
    path, result = sample()
    assert result.exit_code == 0, result.output
    assert "sequences       10" in result.stdout
    texts = texts_of(path)
    assert len(set(texts)) == 10 and all(texts)
    made = ["quantize", "--model_dir", model_dir, "--quant_scheme", "int8_wo", "--quant_algo"]
    made += ["gptq", "--skip_evaluation", "--seq_len", 8, "--num_calib_data", 10]
    alone = quark(*made, "--dataset", path, "--output_dir", tmp_path / "alone")
    mixed = quark(*made, "--dataset", f"{text}:0.6,{path}:0.4", "--output_dir", tmp_path / "mixed")
    assert alone.exit_code == mixed.exit_code == 0, alone.output + mixed.output
    digests = {
        json.loads((tmp_path / name / "config.json").read_text("utf-8"))["calibration_sha256"]
        for name in ("alone", "mixed")
    }
    assert len(digests) == 2


def test_the_text_depends_on_the_seed_alone(sample):
    (first, _), (same, result) = sample(), sample("--json", name="same.jsonl")
    other, _ = sample("--seed", 2**32 - 1, name="other.jsonl")
    assert first.read_bytes() == same.read_bytes() != other.read_bytes()
    assert json.loads(result.stdout) == {"output": str(same), "samples": 10, "tokens": 12}


def test_files_are_replaced_on_demand(sample):
    path, _ = sample()
    before = path.read_bytes()
    _, result = sample("--seed", 1)
    assert result.exit_code == 2 and "give --overwrite" in result.stderr
    assert path.read_bytes() == before
    assert sample("--seed", 1, "--overwrite")[1].exit_code == 0
    assert path.read_bytes() != before


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ([], "sampled.txt", "expected a name that ends in .jsonl"),
        (["--seed", 2**32], "sampled.jsonl", "--seed"),
        (["--num_samples", 0], "sampled.jsonl", "--num_samples"),
        (["--seq_len", 1], "sampled.jsonl", "--seq_len"),
        (["--seq_len", 65], "sampled.jsonl", "--seq_len"),
    ],
)
def test_a_wrong_call_writes_nothing(flags, name, reason, sample, tmp_path):
    _, result = sample(*flags, name=name)
    assert result.exit_code == 2 and reason in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_model_that_memory_does_not_hold(sample, monkeypatch, tmp_path):
    from quark.torch.evaluation import sampling

    monkeypatch.setattr(sampling, "residency_of", lambda model: object())
    _, result = sample()
    assert result.exit_code == 2
    assert "each token would read all of it. Let a smaller model" in result.stderr
    assert not any(tmp_path.iterdir())
