"""Vision-language models are quantized, written and read with equal logits, by their own class."""

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.preparation import quantized_layers
from tests.models.vision_language import CASES, build, images, text

# Scheme, algorithm, and whether the vision tower is quantized too.
SCHEMES = {
    "fp8": ("fp8", None, False),
    "fp8 tower": ("fp8", None, True),
    "int8": ("int8", None, False),
    "int4": ("int4_wo_32", None, False),
    "gptq": ("int4_wo_32", "gptq", False),
    "awq": ("uint4_wo_32", "awq", False),
}
SLICE = [("llava", "fp8"), ("qwen2_5_vl", "gptq"), ("mllama", "int4")]


def check(name, scheme, algorithm, with_tower, tmp_path):
    """Quantize, export, and load by both ways; compare logits with and without images."""
    import transformers

    batches = [text()] if algorithm else [images(name)]
    parts = [] if with_tower else None
    template = LLMTemplate.get(name)
    config = template.get_config(scheme, algorithm=algorithm, float_parts=parts)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build(name), batches))
    assert any("vis" in n for n, _ in quantized_layers(model)) == with_tower
    export_safetensors(model, tmp_path / "out")
    kind = getattr(transformers, CASES[name].model)
    for loaded in (load_checkpoint(tmp_path / "out"), kind.from_pretrained(tmp_path / "out")):
        assert type(loaded) is kind
        for batch in (images(name), text()):
            with torch.no_grad():
                assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(("name", "kind"), SLICE)
def test_slice(name, kind, tmp_path):
    check(name, *SCHEMES[kind], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("name", CASES)
def test_every_model(name, kind, tmp_path):
    check(name, *SCHEMES[kind], tmp_path)
