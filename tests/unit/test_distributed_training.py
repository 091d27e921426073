"""Training aware of quantization in several processes, under ``DistributedDataParallel``."""

import multiprocessing
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QATSpec, QuantizationConfig, TQTSpec
from quark.torch.training import freeze_ranges
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    export,
    graph_config,
    images,
    network,
)

LSQ = replace(INT8, qat_spec=QATSpec())
TQT = replace(INT8, scale_type="pof2", qat_spec=TQTSpec())
LAYERS = {
    "following": EVERYTHING,
    "lsq": QuantizationConfig(LSQ, LSQ, LSQ),
    "tqt": QuantizationConfig(TQT, TQT, TQT),
}


def train(rank, store, results):
    """Train on the data of one process, and put the states before and after into a queue."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    for case, layer in LAYERS.items():
        quantizer = ModelQuantizer(graph_config(layer))
        with torch.random.fork_rng():
            model = quantizer.quantize_model(export(network("resnet")), images()).train()
        start = {name: x.clone() for name, x in model.state_dict().items()}
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(4):
            if step == 3:
                freeze_ranges(model)
            optimizer.zero_grad()
            parallel(images()[step % 3] * (1 + rank + step)).square().mean().backward()
            if step < 3:
                optimizer.step()
        frozen = quantizer.freeze(model.eval())
        tensors = {name: x.detach().numpy() for name, x in frozen.state_dict().items()}
        scales = [name for name in start if name.endswith(("scale", "learned_range"))]
        moved = [name for name in scales if not torch.equal(start[name], frozen.state_dict()[name])]
        results.put((rank, case, tensors, len(moved) / len(scales)))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    sys.platform == "win32", reason="the store is a file, which gloo cannot share there"
)
def test_processes_end_with_the_same_weights_and_ranges(tmp_path):
    context = multiprocessing.get_context("spawn")  # forks have the devices of other tests
    results = context.Queue()
    processes = [
        context.Process(target=train, args=(rank, tmp_path / "store", results)) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    states = [results.get(timeout=120) for _ in range(2 * len(LAYERS))]
    for process in processes:
        process.join()
    for case in LAYERS:
        (first, moved), (second, _) = (
            (tensors, share)
            for _, name, tensors, share in sorted(states, key=lambda state: state[0])
            if name == case
        )
        assert first.keys() == second.keys()
        differing = [name for name in first if (first[name] != second[name]).any()]
        assert not differing, case
        assert moved > 0.9 or case == "tqt"
