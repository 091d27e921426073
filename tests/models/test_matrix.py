"""Every family of models, quantized every way, exported, and read back by every loader."""

import operator

import pytest
import torch

from quark.torch.quantization.config.algo import AutoSmoothQuantConfig, AWQConfig, SmoothQuantConfig
from tests.models.matrix import FAMILIES, WAYS, function_change, outcome, table

CASES = [case for cases in FAMILIES.values() for case in cases]
ALL = [pytest.param(case, way, id=f"{case.name}-{way}") for case in CASES for way in WAYS]
# The slice of every run: each family, each way, and the models that read types of weights.
SLICE = {
    *(("BART", "gptq"), ("T5", "fp8"), ("Whisper", "awq"), ("BERT", "int8")),
    *(
        ("CLIP", "fp8"),
        ("Swin", "gptq"),
        ("Swin V2", "awq"),
        ("ConvNeXt", "int4_wo_32"),
        ("EfficientNet", "int8"),
    ),
    *(("Qwen3-VL", "awq"), ("Falcon", "gptq")),
}
NAME = operator.attrgetter("name")
RESCALINGS = [AWQConfig(), SmoothQuantConfig(), AutoSmoothQuantConfig()]


def expected(case, way):
    return "–" if way in case.lacks else "✓"


@pytest.fixture(autouse=True)
def quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.parametrize(
    ("case", "way"), [p for p in ALL if (p.values[0].name, p.values[1]) in SLICE]
)
@pytest.mark.sampled(3)
def test_a_slice(case, way):
    assert outcome(case, way) == expected(case, way)


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "way"), ALL)
def test_all(case, way):
    assert outcome(case, way) == expected(case, way)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", RESCALINGS, ids=NAME)
@pytest.mark.parametrize("case", CASES, ids=NAME)
def test_rescaling_keeps_the_function(case, algorithm):
    if (case.name, algorithm.name) == ("EfficientNet", "autosmoothquant"):
        with pytest.raises(ValueError, match="lie in different blocks"):
            function_change(case, algorithm)
    else:
        assert function_change(case, algorithm) < 1e-3


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("Whisper", "CLIP")], ids=NAME)
def test_rescaling_keeps_the_function_of_some(case):
    assert function_change(case, AWQConfig()) < 1e-3


def test_the_table(monkeypatch):
    monkeypatch.setattr("tests.models.matrix.outcome", lambda case, way: f"{case.name} {way}")
    rows = table({"vision": FAMILIES["vision"][:1]}).splitlines()
    assert rows[0] == "| family | model | fp8 | int8 | int4_wo_32 | gptq | awq |"
    assert rows[2].startswith("| vision | ViT | ViT fp8 | ViT int8 |")
    assert len(rows) == 3


def test_models_are_random_in_all_parameters():
    for case in CASES[:2]:
        values = [p.std() for p in case.build().parameters() if p.numel() > 1]
        assert all(torch.isfinite(v) and v > 0.05 for v in values)
