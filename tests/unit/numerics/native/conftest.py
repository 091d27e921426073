import pytest

from quark.torch.numerics.native import compilation


@pytest.fixture
def any_size(monkeypatch):
    """Let kernels process tensors of any size, as they do large ones."""
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
