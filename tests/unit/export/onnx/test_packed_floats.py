"""Types for narrow floats and their scales, which opset 28 has."""

import pytest
import torch

from quark.torch import export_onnx
from tests.unit.export.onnx.test_writer import parallel, read

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx.reference")


@torch.no_grad()
def test_opset_28_has_types_for_narrow_floats_and_their_scales(tmp_path):
    """The evaluator of the package onnx computes the weights; ONNX Runtime has no such opset."""
    kinds = {
        "mxfp4_weight_only": ("FLOAT4E2M1", "FLOAT8E8M0", 4),
        "w_mxfp6_e3m2": ("FLOAT6E3M2", "FLOAT8E8M0", 6),
        "w_mxfp6_e2m3": ("FLOAT6E2M3", "FLOAT8E8M0", 6),
        "nvfp4_weight_only": ("FLOAT4E2M1", "FLOAT", 4),
    }
    model, x = parallel(kinds), torch.eye(64)
    export_onnx(model, tmp_path / "out", x, opset_version=28)
    path = tmp_path / "out" / "quark_model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    stored = {t.name: t for t in read(tmp_path / "out").graph.initializer}
    results = onnx.reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    name_of = onnx.TensorProto.DataType.Name
    for i, (kind, result) in enumerate(zip(kinds.values(), results, strict=True)):
        codes, scale = (stored[f"layers.{i}.weight.{part}"] for part in ("codes", "scale"))
        found = name_of(codes.data_type), name_of(scale.data_type), len(codes.raw_data) / 64
        assert found == kind
        assert torch.from_numpy(result).equal(model.layers[i].value("weight").T), kind


@torch.no_grad()
@pytest.mark.parametrize("name", ["w_mxfp6_e2m3", "mxfp4_weight_only"])
def test_a_decoder_in_opset_28(build, quantize, tmp_path, name):
    """Its attention is written without the operator Attention."""
    model, tokens = quantize(build(), name), torch.arange(12).reshape(2, 6)
    export_onnx(model, tmp_path / "out", tokens, opset_version=28)
    path = tmp_path / "out" / "quark_model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    other = tokens.flip(1) + 7
    (result,) = onnx.reference.ReferenceEvaluator(str(path)).run(None, {"input_ids": other.numpy()})
    assert float((torch.from_numpy(result) - model(other).logits).abs().max()) < 1e-5
