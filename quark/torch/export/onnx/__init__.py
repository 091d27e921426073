"""ONNX: models as graphs, for ONNX Runtime."""
