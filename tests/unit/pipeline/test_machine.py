"""The probe of the speed of the machine."""

import errno
import io
import math

import pytest
import torch

from quark.torch.pipeline import machine


def test_products_have_the_speed_of_an_idle_machine(monkeypatch):
    """Other work interrupts two of three products. The clock is made up."""
    now = [0.0]
    durations = iter([0.01, 0.04, 0.01, 0.25])  # the first one is not measured

    def product(self, other):
        now[0] += next(durations)
        return self

    monkeypatch.setattr(machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    speed = machine._products(torch.float32, torch.device("cpu"), 0.25)
    assert speed == pytest.approx(2.0 * machine._SIDE**3 / 0.01)


def test_all_speeds_are_measured(tmp_path):
    file = tmp_path / "model"
    file.write_bytes(bytes(1 << 20))
    speeds = machine.probe([file], tmp_path, torch.bfloat16, seconds=0.01)
    assert all(0 < speed < math.inf for speed in speeds)
    assert machine.probe([], tmp_path, seconds=0.01).read == math.inf  # nothing to read
    assert sorted(tmp_path.iterdir()) == [file]


def test_a_file_that_is_too_large_is_named(tmp_path, monkeypatch):
    class Limited(io.BytesIO):
        def write(self, data):
            raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", lambda **options: Limited())
    with pytest.raises(OSError, match="File too large") as caught:
        machine.probe([], tmp_path, seconds=0.01)
    assert caught.value.filename == str(tmp_path)
