"""``quark search`` for models whose tokens read a part of the weights."""

import json

import pytest
from transformers import AutoTokenizer

from quark.demo.text import model_directory


@pytest.fixture
def mixtral_dir(build, tmp_path):
    build("mixtral", vocab_size=2048, num_local_experts=4).save_pretrained(tmp_path / "mixtral")
    AutoTokenizer.from_pretrained(model_directory()).save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral"


def test_bits_per_weight_are_those_of_the_file(quark, mixtral_dir, text, tmp_path):
    """They grow with its bytes, whatever size the search limits."""
    path, picture = tmp_path / "mixed.json", tmp_path / "mixed.svg"
    result = quark(
        *("search", "--model_dir", mixtral_dir, "--output", path, "--picture", picture),
        *("--formats", "int2_wo_32,int4_wo_32,int8_wo", "--target_read", "710kB", "--json"),
        *("--dataset", text, "--num_calib_data", 4, "--seq_len", 32, "--skip_evaluation"),
    )
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["sizes"]}
    small, mixed, large = (rows[name] for name in ("int2_wo_32", "mixed", "int8_wo"))
    weights = 8 * (large["bytes"] - small["bytes"])
    weights /= large["bits_per_weight"] - small["bits_per_weight"]
    assert weights == pytest.approx(2 * (64 * 192 + 4 * 3 * 64 * 96), rel=1e-4)
    grown = mixed["bits_per_weight"] - small["bits_per_weight"]
    assert grown > 0.1
    assert 8 * (mixed["bytes"] - small["bytes"]) == pytest.approx(weights * grown, abs=16)
    assert ">bits per weight that a token reads<" in picture.read_text("utf-8")
