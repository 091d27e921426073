"""The package calls nothing that Windows lacks, but where it asks first."""

import ast
import sys
from importlib import import_module

import pytest

# Modules and names of the standard library that exist on POSIX alone.
MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
NAMES = {
    "os": {
        *("chown", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid"),
        *("getuid", "killpg", "lchown", "mkfifo", "mknod", "nice", "posix_fadvise", "pread"),
        *("posix_fallocate", "pwrite", "sched_getaffinity", "setgid", "setsid", "setuid"),
        *("statvfs", "sync", "sysconf", "uname", "wait", "O_DIRECT", "O_DIRECTORY"),
    },
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "pause"},
    "time": {"clock_gettime", "tzset"},
}
# (File, name) -> how Windows is asked for first.
GUARDED = {
    ("quark/torch/pipeline/machine.py", "resource"): "try: import",
    ("quark/torch/pipeline/activation_store.py", "os.posix_fallocate"): "hasattr",
    ("quark/torch/pipeline/temporary_directory.py", "os.getuid"): "hasattr",
}


def calls(source):
    """The modules and names of POSIX alone that a source uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in MODULES:
                yield node.module
            own = NAMES.get(node.module, set())
            yield from (f"{node.module}.{a.name}" for a in node.names if a.name in own)
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            yield from [f"{module}.{node.attr}"] * (node.attr in NAMES.get(module, set()))


def test_the_package_runs_on_windows(texts):
    files = {path.replace("\\", "/"): text for path, text in texts.items()}
    assert {(path, name) for path, text in files.items() for name in calls(text)} == set(GUARDED)


@pytest.mark.parametrize(
    "source",
    [
        *("import fcntl", "from pwd import getpwuid", "os.fork()", "from os import sync"),
        "signal.SIGKILL",
    ],
)
def test_calls_are_found(source):
    assert list(calls(source)) != []


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")
def test_all_names_exist():
    for module, names in NAMES.items():
        assert [name for name in names if not hasattr(import_module(module), name)] == []
