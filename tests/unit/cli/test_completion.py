"""The shell completes verbs, flags, and values that are names in a table."""

import pytest
from typer.testing import CliRunner

from quark.cli.main import app


@pytest.fixture
def completed():
    def completed(words):
        environment = {
            "_QUARK_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        result = CliRunner().invoke(app, env=environment, prog_name="quark")
        return result.stdout.split()

    return completed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quark qua", ["quantize"]),
        ("quark convert in out --to g", ["gptq", "gguf"]),
        ("quark quantize --kv_cache_dtype fp8", ["fp8"]),
        ("quark quantize --recipe w4", ["w4", "w4a4", "w4a4_rotated"]),
        ("quark quantize --quant_scheme int4_wo", None),
        ("quark quantize --quant_algo awq,gp", ["awq,gptq"]),
    ],
)
def test_completion(words, expected, completed):
    found = completed(words)
    if expected is None:
        expected = ["int4_wo_per_channel", "int4_wo_32", "int4_wo_64", "int4_wo_128"]
    assert [word for word in expected if word not in found] == []
    last = words.split(" ")[-1]
    assert all(word.startswith(last) for word in found)


def test_flags_are_completed(completed):
    assert completed("quark quantize --quant_sch") == ["--quant_scheme"]
