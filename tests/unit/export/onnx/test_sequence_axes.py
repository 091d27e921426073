"""Axes of inputs: those that a model needs equal have one name, others have any sizes."""

import pytest
import torch
from torch import nn

from quark.torch import export_onnx
from quark.torch.export.onnx.inputs import ModelInputs

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class TwoStacks(nn.Module):
    """An encoder with a mask, and a decoder with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 32), nn.Linear(32, 8)

    def forward(self, ids, mask, decoder_ids, decoder_mask):
        encoded = (self.embedding(ids) * mask.unsqueeze(-1)).sum(1, keepdim=True)
        decoded = self.embedding(decoder_ids) * decoder_mask.unsqueeze(-1)
        return self.layer(encoded + decoded)


def inputs(encoder, decoder):
    return {
        "ids": torch.randint(0, 16, (2, encoder)),
        "mask": torch.ones(2, encoder, dtype=torch.int64),
        "decoder_ids": torch.randint(0, 16, (2, decoder)),
        "decoder_mask": torch.ones(2, decoder, dtype=torch.int64),
    }


@pytest.mark.parametrize("decoder", [1, 5, 7])
def test_each_stack_has_its_own_sequence(decoder):
    example = inputs(5, decoder)
    axes = ModelInputs.bind(TwoStacks(), example).dynamic_axes(TwoStacks(), None)
    own = {0: "batch", 1: "decoder_ids_sequence"}
    assert axes == [{0: "batch", 1: "sequence"}] * 2 + [own] * 2


@pytest.mark.parametrize("decoder", [5, 7])
def test_the_graph_takes_other_lengths(tmp_path, quantize, run_onnx, decoder):
    model = quantize(TwoStacks().eval(), "int8_wo")
    export_onnx(model, tmp_path / "out", inputs(5, decoder))
    for sizes in ((3, 9), (9, 3), (4, 4)):
        batch = inputs(*sizes)
        with torch.no_grad():
            expected = model(**batch)
        result = run_onnx(tmp_path / "out", *batch.values())[0]
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_views_of_attention(tmp_path, quantize, run_onnx):
    """T5 reshapes the result of a fused kernel, whose strides a graph does not have."""
    from transformers import AutoConfig, T5EncoderModel

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_heads": 2, "num_layers": 1}
    model = T5EncoderModel(AutoConfig.for_model("t5", vocab_size=16, **sizes)).eval()
    model = quantize(model, "int8_wo")
    ids = torch.randint(0, 16, (2, 5))
    export_onnx(model, tmp_path / "out", {"input_ids": ids}, dynamic_shapes={})
    with torch.no_grad():
        expected = model(ids).last_hidden_state
    torch.testing.assert_close(run_onnx(tmp_path / "out", ids)[0], expected, rtol=0, atol=1e-4)
