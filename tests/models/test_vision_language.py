"""Templates quantize vision-language models; both loaders return them with equal logits."""

import pytest
import torch

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.export.recognition import load_checkpoint
from quark.torch.quantization.preparation import quantized_layers
from tests.models.vision_language import CASES, build, images, text

# Scheme, algorithm, and whether the data has images. ``matrix`` has every layer and all ways.
SCHEMES = {
    "fp8": ("fp8", None, True),
    "int8 text": ("int8", None, False),
    "int4": ("int4_wo_32", None, True),
    "gptq": ("int4_wo_32", "gptq", True),
    "gptq text": ("int4_wo_32", "gptq", False),
    "awq": ("uint4_wo_32", "awq", True),
    "awq text": ("uint4_wo_32", "awq", False),
}
SLICE = [("llava", "fp8"), ("qwen2_5_vl", "gptq"), ("mllama", "int8 text"), ("gemma3", "awq")]


def check(name, scheme, algorithm, has_images, tmp_path):
    """Quantize, export, and load by both ways; compare logits with and without images."""
    import transformers

    batches = [images(name) if has_images else text()]
    config = LLMTemplate.get(name).get_config(scheme, algorithm=algorithm)
    model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(build(name), batches))
    layers = [layer for layer, _ in quantized_layers(model)]
    assert layers
    assert not [layer for layer in layers if "vis" in layer or "projector" in layer]
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
