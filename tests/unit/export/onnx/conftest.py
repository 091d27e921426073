"""Every test of the room exports."""

import pytest


@pytest.fixture(autouse=True)
def operators(onnx_operators):
    return onnx_operators
