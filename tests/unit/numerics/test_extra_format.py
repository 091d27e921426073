"""A number format that is added to ``Dtype`` runs through the tests of numerics as they are."""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = ["formats", "packing", "qdq", "scales", "block_formats", "block_storage", "pieces"]


def test_tests_take_a_new_format_by_its_fields():
    """In a process of its own: members of an enumeration cannot be taken back."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.unit.numerics.extra_format"]
    command += ["-p", "no:cacheprovider", "-k", "fp5_e2m2 or every or kind"]
    files = [str(HERE / f"test_{name}.py") for name in FILES]
    done = subprocess.run(
        [*command, *files], capture_output=True, text=True, check=False, cwd=HERE.parents[2]
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100
