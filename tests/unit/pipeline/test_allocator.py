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
