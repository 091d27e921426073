"""Memory that large tensors took is returned, though small ones lie between them."""

import ctypes
import subprocess
import sys

import pytest

MIB = 1 << 20
WORK = """
import psutil, torch
from quark.torch.pipeline.allocator import keep_holes_small

def taken():
    return psutil.Process().memory_info().rss >> 20

if {keeps}:
    keep_holes_small()
first = torch.ones({size})
del first  # from now on, the heap takes tensors of this size
before, large, small = taken(), [], []
for _ in range(10):
    large.append(torch.ones({size}))
    small.append(torch.ones(1000))
held = taken() - before
large.clear()
print(held, taken() - before)
"""


def _is_glibc():
    try:
        return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
    except (OSError, TypeError):
        return False


@pytest.mark.skipif(not _is_glibc(), reason="only glibc keeps such memory")
@pytest.mark.parametrize("keeps", [False, True])
def test_holes(keeps):
    code = WORK.format(keeps=keeps, size=20 * MIB // 4)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    held, left = map(int, done.stdout.split())
    assert held >= 190
    assert left < 20 if keeps else left > 100


REUSE = """
import resource, psutil, torch
from contextlib import nullcontext
from quark.torch.pipeline.allocator import reuse_freed_memory

torch.set_num_threads(1)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with reuse_freed_memory() if {reuses} else nullcontext():
    for _ in range(40):
        torch.ones({size})
    before = faults()
    for _ in range(10):
        torch.ones({size})
    taken = faults() - before
print(taken, psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.skipif(not _is_glibc(), reason="only glibc keeps such memory")
@pytest.mark.parametrize("reuses", [False, True])
def test_freed_memory_is_reused(reuses):
    """Ten tensors of 16,384 pages, larger than glibc keeps in its heap by itself.

    The heap finds its place for them among the forty before: after two to ten of them, since where
    it begins is random.
    """
    code = REUSE.format(reuses=reuses, size=64 * MIB // 4)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    faults, left = map(int, done.stdout.split())
    assert faults < 10_000 if reuses else faults > 100_000
    without = _taken_by_imports()
    assert left < without + 30  # it is returned afterwards


def _taken_by_imports():
    code = "import psutil, torch, quark.torch.pipeline.allocator as a; "
    code += "print(psutil.Process().memory_info().rss >> 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    return int(done.stdout)
