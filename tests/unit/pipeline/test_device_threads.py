"""Threads of devices exchange values and tensors as processes do. Here all devices are the CPU."""

import threading
import time

import pytest
import torch

from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.pipeline.device_threads import device_after, run_on_devices
from quark.torch.pipeline.processes import (
    Processes,
    ProcessFailure,
    alone,
    describe,
    joined,
    processes,
    working_in,
)
from quark.torch.pipeline.reducer import Leaves, Reducer
from quark.torch.pipeline.runner import run_blocks
from tests.configurations import quantized_by

CPUS = [torch.device("cpu")] * 3


def run(work):
    return run_on_devices(CPUS, lambda rank: work(processes(), rank))


def test_values_come_in_the_order_of_the_devices():
    def work(group, rank):
        return [group.exchange({rank: value}) for value in (0.1, None)]

    # As from other processes: keys are strings, and nothing is shared.
    assert run(work) == [[{"0": x}, {"1": x}, {"2": x}] for x in (0.1, None)]


def test_tensors_are_copied():
    given = [torch.arange(3.0), None]
    copies = {}

    def work(group, rank):
        own = given if rank == 1 else ()
        copies[rank] = group.broadcast(own, describe(given), 1)[0]
        copies["sent", rank] = group.send(own, describe(given), 1, 2)

    run(work)
    assert copies["sent", 0] == ()  # neither the source nor the target
    received = [copies[0], copies[2], copies["sent", 2][0]]
    assert all(torch.equal(x, given[0]) for x in received)
    assert len({x.data_ptr() for x in [*received, given[0]]}) == 4
    assert copies["sent", 2][1] is None


class Log:
    """Statistics that know in which order they were added."""

    is_empty = False

    def __init__(self):
        self.order = torch.empty(0)

    def merge(self, other):
        self.order = torch.cat([self.order, other.order])

    def tensors(self):
        return (self.order,)

    def set_tensors(self, tensors):
        (self.order,) = tensors


def test_leaves_are_added_in_their_order():
    def work(group, rank):
        leaves = Leaves(11)
        reducer = Reducer(["a", "b"], lambda leaf: Log())
        chunks = [[n for n in range(11) if leaves.leaf_of(n) == leaf] for leaf in range(8)]
        for own in reducer.run(leaves, lambda leaf: chunks[leaf] if leaf < 8 else []):
            for part in reducer.parts.values():
                part.order = torch.tensor(own)
        return [total.order.tolist() for total in reducer.totals.values()]

    assert run(work) == [list(range(11))] * 2


def test_devices_follow_each_other():
    devices = [torch.device("meta", number) for number in (0, 2, 1)]
    after = [[device_after(device, steps, devices) for device in devices] for steps in (1, -1)]
    assert [[device.index for device in row] for row in after] == [[2, 1, 0], [1, 0, 2]]
    assert device_after(torch.device("cpu"), 1, devices) == torch.device("cpu")


def test_each_measures_a_part():
    seen = {}

    def work(group, rank):
        seen[rank] = []
        return group.measure(range(7), lambda x: seen[rank].append(x) or x * x)

    assert run(work) == [x * x for x in range(7)]
    assert seen == {0: [0, 3, 6], 1: [1, 4], 2: [2, 5]}


def test_threads_are_joined_already():
    def work(group, rank):
        with joined() as own:
            assert own is group
            own.exchange(None)
        with alone():
            assert (processes().count, processes().is_first) == (1, rank == 0)
        return threading.current_thread() is threading.main_thread()

    assert run(work) is False
    assert processes().count == 1


def test_settings_of_the_caller_hold():
    with torch.no_grad():
        assert run(lambda group, rank: torch.is_grad_enabled()) is False
    assert run(lambda group, rank: torch.is_grad_enabled()) is True


@pytest.mark.parametrize("waiting", ["exchange", "send", "broadcast"])
def test_a_failure_ends_all(waiting):
    ends = {}

    def work(group, rank):
        if rank == 1:
            raise LookupError("the reason")
        try:
            if waiting == "exchange":
                group.exchange(rank)
            elif waiting == "send":
                group.send((), [], 1, rank)
            else:
                group.broadcast((), [], 1)
        except ProcessFailure as error:
            ends[rank] = str(error)
            raise

    with pytest.raises(LookupError, match="the reason"):
        run(work)
    assert ends == dict.fromkeys((0, 2), "Another device failed: LookupError: the reason")


class Failed(Processes):
    """A process that knows of the failure of another one."""

    def check_others(self):
        raise ProcessFailure("the reason")


def test_long_work_ends_soon(build, batches):
    """A thread that exchanges nothing for long looks for failures before a batch and a layer."""
    seen = threading.Event()

    def work(group, rank):
        if rank == 1:
            raise LookupError("the reason")
        for _ in range(1000):  # seconds in all
            try:
                group.check_others()
            except ProcessFailure:
                seen.set()
                raise
            time.sleep(0.01)

    with pytest.raises(LookupError):
        run(work)
    assert seen.is_set()
    model = quantized_by(build(num_hidden_layers=1), "int4_wo_32", frozen=False)
    layers = {"a": model.model.layers[0].mlp.up_proj}
    with working_in(Failed()), pytest.raises(ProcessFailure, match="the reason"):
        change_layers(layers, [["a"]], pytest.fail)
    with working_in(Failed()), pytest.raises(ProcessFailure, match="the reason"):
        for block in run_blocks(model, ["model.layers.0"], batches, ""):
            block.run()
