"""CPU time to read and write blocks of GGUF files, beside the package gguf.

``python benchmarks/gguf_blocks.py`` prints a row for each type of blocks, of a weight of 2048 by
4096, in one thread. Both sides read blocks as values in float32. Writing begins with codes and
scales here, and with values in the package, which rounds them itself, and not to K-quants.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from gguf import GGMLQuantizationType, quants
from measure import cpu_seconds

from quark.torch.export.gguf.blocks import block_spec, pack_blocks, unpack_blocks
from quark.torch.numerics.qdq import dequantize

SHAPE, RUNS = (2048, 4096), 5
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4", "Q4_K", "Q6_K")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| blocks | read: ours / gguf | write: ours / gguf |")
    print("| --- | ---: | ---: |")
    for kind in KINDS:
        print(_row(kind), flush=True)


def _row(kind: str) -> str:
    """Measure a type of blocks."""
    number = GGMLQuantizationType[kind]
    values = torch.randn(SHAPE).numpy()
    try:
        data = quants.quantize(values, number)
    except NotImplementedError:
        data = None
    blocks = _random_blocks(kind) if data is None else torch.from_numpy(data)
    spec = block_spec(kind, blocks, kind)
    state = unpack_blocks(blocks, spec, kind)

    def read() -> torch.Tensor:
        state = unpack_blocks(blocks, spec, kind)
        return dequantize(state.codes, state.scale, state.zero_point, state.scheme)

    theirs = torch.from_numpy(quants.dequantize(blocks.numpy(), number))
    assert torch.allclose(read(), theirs, rtol=1e-5, atol=1e-5), kind
    reading = _ratio(read, lambda: quants.dequantize(blocks.numpy(), number))
    writing = "–"
    if data is not None:
        ratio = _ratio(lambda: pack_blocks(state, kind), lambda: quants.quantize(values, number))
        writing = f"{ratio:.2f}"
    return f"| {kind} | {reading:.2f} | {writing} |"


def _ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Return the median ratio of CPU times, measured in turns."""
    return median(_seconds(ours) / _seconds(theirs) for _ in range(RUNS))


def _seconds(work: Callable[[], object]) -> float:
    start = cpu_seconds()
    work()
    return cpu_seconds() - start


def _random_blocks(kind: str) -> torch.Tensor:
    """Return blocks of random codes under small scales."""
    from gguf import GGML_QUANT_SIZES

    size, length = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows, columns = SHAPE
    blocks = torch.randint(0, 256, (rows, columns // size, length), dtype=torch.uint8)
    half = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    places = {"Q4_K": (0, 2), "Q6_K": (length - 2,)}[kind]
    for place in places:
        blocks[..., place : place + 2] = half
    return blocks.flatten(1)


if __name__ == "__main__":
    main()
