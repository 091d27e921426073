"""Checkpoints in the layout of ModelOpt, against ModelOpt itself."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from quark.torch import ModelImporter, import_model_from_safetensors
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.configurations import preset

pytestmark = pytest.mark.client("modelopt")
LAYERS = [
    f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp.down_proj", "self_attn.o_proj")
]


@pytest.mark.parametrize(("name", "error"), [("FP8", 1 / 16), ("NVFP4", 1 / 4), ("MXFP8", 1 / 16)])
def test_what_it_writes(build, batches, logits, tmp_path, name, error):
    """Its own quantized products need CUDA: weights are compared with those in float."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = build(dtype=torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    config = copy.deepcopy(getattr(mtq, f"{name}_DEFAULT_CFG"))
    model = mtq.quantize(model, config, lambda m: [m(batch) for batch in batches])
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=tmp_path)
    loaded = ModelImporter(tmp_path, "safetensors").import_model_info(build(device="meta"))
    floats = import_model_from_safetensors(None, tmp_path, dequantize=True)
    plain = build(dtype=torch.bfloat16)
    for layer in LAYERS:
        ours, theirs = (m.get_submodule(layer).weight.float() for m in (floats, plain))
        assert (ours - theirs).norm() < error / 2 * theirs.norm(), layer
        assert not ours.equal(theirs)
    text = json.loads((tmp_path / "config.json").read_text())
    del text["quantization_config"]  # the other file alone
    (tmp_path / "config.json").write_text(json.dumps(text))
    again = ModelImporter(tmp_path, "safetensors").import_model_info(build(device="meta"))
    assert logits(again).equal(logits(loaded))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_weight_only"])
def test_what_it_reads(build, quantize, export, name):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model = quantize(build(), preset(name))
    stored = load_file(export(model, custom_mode="modelopt") / "model.safetensors")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, FakeQuantizedLayer)}
    assert len(layers) == 14
    for path, layer in layers.items():
        codes = NVFP4QTensor(layer.weight.shape, torch.float32, stored[f"{path}.weight"])
        weight = codes.dequantize(
            scale=stored[f"{path}.weight_scale"],
            double_scale=stored[f"{path}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert weight.equal(layer.weight), path
