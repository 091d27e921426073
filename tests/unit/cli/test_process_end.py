"""The end of a process of the command line."""

import subprocess
import sys


def test_modules_are_not_collected_at_the_end_of_the_process():
    """A cycle of a module stays as it is: nothing calls its finalizer."""
    code = (
        "import gc, sys; gc.disable(); from quark.cli.main import main\n"
        "class Cycle:\n"
        "    def __del__(self):\n"
        "        sys.__stdout__.write('collected')\n"
        "cycle = Cycle(); cycle.own = cycle; del cycle\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quark ")
    assert "collected" not in done.stdout
