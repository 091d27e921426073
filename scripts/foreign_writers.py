"""Checkpoints of the shipped model as other software writes them. Run without this package.

    python foreign_writers.py WRITER SOURCE FOLDER

SOURCE is a directory of Transformers, for llama.cpp a GGUF file. Prints a line of JSON: a list of
[kind, path] of what was written to FOLDER.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

Written = list[tuple[str, Path]]
# Kinds of mlx_lm.convert: bits, inputs of a group.
MLX_KINDS = ((2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 32), (6, 64), (8, 32))
GGUF_KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


def mlx(source: Path, folder: Path) -> Written:
    """Write by ``mlx_lm.convert``, scales in float32."""
    import mlx.core as mx
    from mlx_lm import convert

    mx.set_default_device(mx.cpu)
    written = []
    for bits, group in MLX_KINDS:
        path = folder / f"{bits}-{group}"
        given = {"q_bits": bits, "q_group_size": group, "dtype": "float32"}
        convert(str(source), mlx_path=str(path), quantize=True, **given)
        written.append((f"{bits} bits, groups of {group}", path))
    return written


def llama_cpp(source: Path, folder: Path) -> Written:
    """Write by the quantization of llama.cpp, without an importance matrix."""
    import llama_cpp as library

    written = []
    for kind in GGUF_KINDS:
        path = folder / f"{kind}.gguf"
        params = library.llama_model_quantize_default_params()
        params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
        params.allow_requantize = True
        done = library.llama_model_quantize(
            str(source).encode(), str(path).encode(), ctypes.byref(params)
        )
        if done != 0:
            raise SystemExit(f"llama.cpp does not write {kind}")
        written.append((kind, path))
    return written


WRITERS: dict[str, Callable[[Path, Path], Written]] = {"llama.cpp": llama_cpp, "mlx": mlx}


def main() -> None:
    writer, source, folder = sys.argv[1:]
    answer = os.dup(1)  # the libraries print to the standard output
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        written = WRITERS[writer](Path(source), Path(folder))
    with os.fdopen(answer, "w") as file:
        print(json.dumps([(kind, str(path)) for kind, path in written]), file=file)


if __name__ == "__main__":
    main()
