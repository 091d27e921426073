"""Kernels run where they may, and operations of torch take their place elsewhere."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from quark.torch.numerics.native import compilation
from quark.torch.numerics.native.compilation import (
    LEAST_ELEMENTS,
    array,
    can_run,
    native_by_type,
    native_function,
    run_rows,
)


def _twice(x):
    return 2 * x


def _thrice(x):
    return 3 * x


@native_by_type
def by_type(kind):
    return {"int16": _twice, "float32": _thrice}[kind]


@native_function
def add(x, y):
    return x + y


@native_function
def scale_rows(x, out, offset):
    for row in range(x.shape[0]):
        for i in range(x.shape[1]):
            out[row, i] = add(by_type(x[row, i]), offset)


@native_function
def divide(x, y):
    return x / y


class TestFunctions:
    def test_a_function_calls_others_of_its_file_and_those_of_a_type(self):
        out = np.zeros((2, 3), np.float32)
        scale_rows(np.ones((2, 3), np.int16), out, 1)
        assert (out == 3).all()
        scale_rows(np.ones((2, 3), np.float32), out, 1)
        assert (out == 4).all()

    def test_a_division_by_zero_is_that_of_torch(self):
        assert divide(np.float32(1), np.float32(0)) == np.inf

    def test_a_full_disk_costs_only_the_kept_code(self, monkeypatch, caplog):
        def fail(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(divide, "_compiled", fail)
        with caplog.at_level(logging.WARNING):
            assert divide(np.float32(3), np.float32(2)) == 1.5
        assert "No space left" in caplog.text
        caplog.clear()
        assert divide(np.float32(3), np.float32(2)) == 1.5
        assert caplog.text == ""

    def test_a_folder_that_cannot_be_written_costs_only_the_kept_code(self, tmp_path):
        """A file stands where the folders of machine code would be."""
        (tmp_path / "sample.py").write_text(
            "from quark.torch.numerics.native.compilation import native_function\n"
            "@native_function\ndef double(x):\n    return 2 * x\n"
        )
        (tmp_path / "__pycache__").write_text("")
        (tmp_path / "home").write_text("")
        home = str(tmp_path / "home")
        names = ("HOME", "LOCALAPPDATA", "USERPROFILE", "XDG_CACHE_HOME", "IPYTHONDIR")
        environment = os.environ | dict.fromkeys(names, home) | {"PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("NUMBA_CACHE_DIR", None)
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", "import sample; print(sample.double(21))"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout == "42\n", done.stderr
        assert (tmp_path / "__pycache__").is_file()


class TestWhereTheyRun:
    LARGE = torch.zeros(LEAST_ELEMENTS)

    def test_large_tensors_of_the_cpu(self):
        assert can_run(self.LARGE)
        assert can_run(self.LARGE, None, torch.ones(2))
        assert can_run(torch.nn.Parameter(self.LARGE, requires_grad=False))

    @pytest.mark.parametrize(
        "tensors",
        [
            [torch.zeros(LEAST_ELEMENTS - 1)],
            [None],
            [LARGE.to("meta")],
            [LARGE, torch.zeros(1, device="meta")],
            [LARGE.clone().requires_grad_()],
            [LARGE, torch.zeros(1, requires_grad=True)],
        ],
        ids=["small", "none", "meta", "partly meta", "gradient", "gradient of another"],
    )
    def test_not_others(self, tensors):
        assert not can_run(*tensors)

    def test_a_gradient_that_is_off_does_not_matter(self):
        with torch.no_grad():
            assert can_run(self.LARGE.clone().requires_grad_())

    def test_not_where_operations_are_observed(self):
        with FlopCounterMode(display=False):
            assert not can_run(self.LARGE)

    def test_modes_of_other_threads_do_not_matter(self, monkeypatch):
        """Not even if they are left in the order in which they were entered."""
        monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
        modes = [FlopCounterMode(display=False) for _ in range(2)]
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            pools = [first, second]
            for call in ("__enter__", "__exit__"):
                arguments = [] if call == "__enter__" else [None, None, None]
                for pool, mode in zip(pools, modes, strict=True):
                    pool.submit(getattr(mode, call), *arguments).result()
                    assert can_run(self.LARGE)

    def test_not_in_a_trace(self):
        answers = []

        def traced(x):
            answers.append(can_run(x))
            return x

        torch.jit.trace(traced, (self.LARGE,), check_trace=False)
        assert answers == [False]

    def test_the_switch(self, monkeypatch):
        monkeypatch.setenv("QUARK_KERNELS", "torch")
        assert not can_run(self.LARGE)
        monkeypatch.setenv("QUARK_KERNELS", "numba")
        with pytest.raises(
            ValueError, match="QUARK_KERNELS='numba' is unknown: give auto or torch"
        ):
            can_run(self.LARGE)

    @pytest.mark.parametrize("is_broken", [False, True])
    def test_numba_is_optional(self, is_broken, monkeypatch, caplog):
        def missing(name):
            raise ImportError("Numba needs NumPy 2.3 or less")

        compilation._has_numba.cache_clear()
        if is_broken:
            monkeypatch.setattr(compilation, "import_module", missing)
        else:
            monkeypatch.setattr(compilation, "find_spec", lambda name: None)
        assert not can_run(self.LARGE)
        assert ("Numba needs NumPy" in caplog.text) is is_broken
        monkeypatch.undo()
        compilation._has_numba.cache_clear()
        assert can_run(self.LARGE)


class TestMemory:
    PROGRAM = """
import torch
from quark.torch.numerics.native import compilation as c
from quark.torch.numerics.native.memory import spare_memory, spare_memory_of, spares_memory
large = torch.zeros(c.LEAST_ELEMENTS)
model = torch.nn.Linear(1, 1)
if {first}:
    assert c.can_run(large)
assert c.expected_memory() > 2**25 or {first}
spare_memory_of(model)
try:
    with spare_memory():
        print(c.can_run(large), c.expected_memory(), spares_memory())
        raise ValueError
except ValueError:
    print(spares_memory())
model = None
print(spares_memory(), c.can_run(large))
"""

    @pytest.mark.parametrize(
        ("first", "expected"),
        [
            (False, ["False 0 True", "True", "False True"]),
            (True, ["True 0 False", "False", "False True"]),
        ],
        ids=["bound", "numba before the bound"],
    )
    def test_numba_stays_out_of_memory_as_long_as_a_run_and_a_model(self, first, expected):
        program = self.PROGRAM.format(first=first)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.split("\n")[-4:-1] == expected, done.stderr


class TestArrays:
    @pytest.mark.parametrize(
        ("dtype", "kind"),
        [
            (torch.float32, "float32"),
            (torch.bfloat16, "int16"),
            (torch.float16, "uint16"),
            (torch.float8_e4m3fn, "uint8"),
            (torch.int8, "int8"),
        ],
    )
    def test_an_array_shares_the_memory(self, dtype, kind):
        x = torch.zeros(2, 3, dtype=dtype)
        shared = array(x)
        assert (str(shared.dtype), shared.shape) == (kind, (2, 3))
        shared[:] = 1
        assert x.view(torch.uint8).any()

    @pytest.mark.parametrize("threads", [1, 3])
    def test_rows_are_divided_between_threads(self, threads, monkeypatch):
        monkeypatch.setattr(compilation, "_PIECE", 4)
        rows = []

        def record(x, out, absent, offset):
            rows.append(len(x))
            assert absent is None
            out[:] = x.sum(1) + offset

        torch.set_num_threads(threads)
        x, out = torch.arange(35, dtype=torch.float32).view(7, 5), torch.zeros(7)
        run_rows(record, [x, out, None], 10)
        assert torch.equal(out, x.sum(1) + 10)
        assert sorted(rows) == ([7] if threads == 1 else [2, 2, 3])
