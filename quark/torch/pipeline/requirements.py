"""What a run takes before it starts: memory, disk, data read, arithmetic and time.

All of it follows from shapes. Memory is that of the step that takes the most::

    interpreter | parameters | changed values kept | hidden states, working set of the step
                  (in memory: all; streamed: up to the limit, at least the largest part)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quark.torch.pipeline.activation_store import LIMIT
from quark.torch.pipeline.memory_limit import ACTIVATIONS, WEIGHTS
from quark.torch.pipeline.run_steps import (
    ELEMENT_FLOPS,
    Run,
    Step,
    list_steps,
    spilled_activations,
)
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work

LATER_IMPORTS = 64 << 20  # bytes of modules that are loaded while a run goes on
HEAP = 1.35  # memory that an allocator keeps for a byte that is in use
DEVICE_CONTEXT = 600 << 20  # bytes that the libraries of a GPU take


class Machine(NamedTuple):
    """The speed of a machine.

    Attributes:
        flops: Products and sums per second in the type of the model.
        solver_flops: The same in float32.
        read: Bytes per second that are read.
        write: Bytes per second that are written to the disk.
    """

    flops: float
    solver_flops: float
    read: float
    write: float


class Requirements(NamedTuple):
    """What a run takes.

    Attributes:
        memory: Bytes of main memory at the peak, the interpreter included.
        device_memory: Bytes of each device at the peak; 0 for a model in main memory.
        devices: Number of devices that share the work.
        interpreter: Bytes of the interpreter with its imports.
        parameters: Bytes of parameters in memory.
        kept: Bytes of values before they were changed, to restore the model after a failure.
        steps: The steps.
        output: Bytes of the checkpoints.
        spilled: Bytes of temporary files: values of weights, and activations.
        read: Bytes of parameters that are read.
        network: Bytes that each process or device sends to others.
        is_streamed: Whether parameters are read when they are used.
    """

    memory: int
    device_memory: int
    devices: int
    interpreter: int
    parameters: int
    kept: int
    steps: tuple[Step, ...]
    output: int
    spilled: tuple[int, int]
    read: int
    network: int
    is_streamed: bool

    @property
    def passes(self) -> float:
        """Times that the calibration data runs through the model."""
        return sum(step.passes for step in self.steps)

    @property
    def flops(self) -> float:
        """All arithmetic."""
        return sum(step.flops + step.solver_flops for step in self.steps)

    def memory_of(self, step: Step) -> int:
        """Return the bytes of main memory, or of the device, while a step runs."""
        own = int(HEAP * step.memory) + self.parameters
        if self.device_memory:
            return DEVICE_CONTEXT + own
        return self.interpreter + LATER_IMPORTS + own + int(HEAP * (self.kept + step.stores))

    @staticmethod
    def seconds_of(step: Step, machine: Machine) -> float:
        """Return the time of a step on a machine, without reading and writing."""
        arithmetic = step.flops / machine.flops + step.solver_flops / machine.solver_flops
        return arithmetic + step.seconds

    def seconds(self, machine: Machine) -> float:
        """Return the time of the run on a machine, without overlap of its parts."""
        arithmetic = sum(self.seconds_of(step, machine) for step in self.steps)
        written = self.output + sum(self.spilled)
        return arithmetic + self.read / machine.read + written / machine.write


def require(run: Run, interpreter: int, bound: int | None = None) -> Requirements:
    """Return what a run takes.

    Args:
        run: The run.
        interpreter: Bytes that the process has taken, before it loads a model.
        bound: Bytes that the process may take: parameters are read when they are used. None for a
            model in memory.
    """
    if run.through_files:
        return _require_files(run, interpreter)
    model = run.model
    free = None if bound is None else max(bound - interpreter, 0)
    limit = LIMIT if free is None else free // ACTIVATIONS
    steps = tuple(list_steps(run, limit, free is not None))
    parameters = model.size if free is None else _resident(run, steps, free)
    is_partial = parameters < model.size
    parameters += model.converted
    if run.finish is not None:  # the original is there as well, in parts in turn with the model
        parameters += model.converted + (model.size if free is None else 0)
    changes = any(_work(work, run).changes for _, work in run.algorithms)
    changed = model.changed if changes else 0
    kept = min(changed, LIMIT) if free is None else 0
    working = max(step.memory for step in steps)
    reads = sum(step.reads for step in steps) if is_partial else 1
    if free is not None:  # each device reads; those of a model in memory get copies
        reads *= run.devices
    if run.on_device:
        # Parameters are read to main memory first: all, or two units for each device, of which one
        # waits. The activations of all devices share the limit.
        loaded = 2 * model.largest_unit * run.devices if is_partial else model.size
        main = loaded + int(HEAP * (kept + max(step.stores for step in steps)))
        device = DEVICE_CONTEXT + parameters + int(HEAP * working)
    else:
        most = max(step.memory + step.stores for step in steps)
        main, device = parameters + int(HEAP * (kept + most)), 0
    return Requirements(
        memory=interpreter + max(LATER_IMPORTS + main, int(HEAP * run.tokenizer_loading)),
        device_memory=device,
        devices=run.devices,
        interpreter=interpreter,
        parameters=parameters,
        kept=kept,
        steps=steps,
        output=run.output,
        spilled=(
            changed - kept
            if free is None
            else is_partial * run.devices * (model.changed + model.largest_unit),
            spilled_activations(run, limit, free is not None),
        ),
        read=model.read_size * reads,
        network=_network(run),
        is_streamed=free is not None,
    )


def _resident(run: Run, steps: Sequence[Step], free: int) -> int:
    """Return the bytes of parameters that stay in memory: what the largest step leaves, up to half.

    Args:
        run: The run.
        steps: Its steps.
        free: Bytes that the process may still take.
    """
    limit, model = free // WEIGHTS, run.model
    if not run.on_device:
        most = max(step.memory + step.stores for step in steps)
        limit = min(limit, free - LATER_IMPORTS - int(HEAP * most) - model.converted)
    return min(model.size, max(limit, model.largest_unit))


def _require_files(run: Run, interpreter: int) -> Requirements:
    """Return what a run from files to files takes.

    Each thread quantizes one of the largest layers, while large tensors in float are copied.
    """
    model = run.model
    copied = 3 * run.data.itemsize * model.around_largest
    layers = sum(layer.elements for layer in model.layers)
    step = Step(
        "files to files",
        run.threads * 8 * FLOAT32 * model.largest_weight + copied,
        solver_flops=ELEMENT_FLOPS * layers,
    )
    working = LATER_IMPORTS + int(HEAP * step.memory)
    memory = interpreter + max(working, int(HEAP * run.tokenizer_loading))
    needs = Requirements(
        memory=memory,
        device_memory=0,
        devices=1,
        interpreter=interpreter,
        parameters=0,
        kept=0,
        steps=(step,),
        output=run.output,
        spilled=(0, 0),
        read=model.read_size,
        network=0,
        is_streamed=True,
    )
    if not run.evaluated:
        return needs
    evaluated = require(
        run._replace(through_files=False, algorithms=(), is_static=False), interpreter
    )
    both = (*needs.steps, evaluated.steps[-2])
    return needs._replace(memory=max(needs.memory, evaluated.memory), steps=both)


def least_bound(run: Run, interpreter: int) -> int:
    """Return the least bound of memory under which a run stays, in bytes.

    A bound is divided among parameters and activations, so a larger one lets more of them stay.
    """
    low, high = interpreter, require(run, interpreter).memory
    if run.through_files:
        return high
    while require(run, interpreter, high).memory > high:
        low, high = high, 2 * high
    while high - low > 1 << 20:
        middle = (low + high) // 2
        if require(run, interpreter, middle).memory > middle:
            low = middle
        else:
            high = middle
    return high


def _network(run: Run) -> int:
    """Return the bytes that each of several processes or devices sends.

    Each sends its part of the statistics of all inputs up the tree, and the blocks that it solved
    to all others.
    """
    count = run.processes * run.devices
    if count == 1 or not run.algorithms:
        return 0
    grams = sum(block.grams for block in run.model.blocks)
    return grams + run.model.changed * (count - 1) // count


def _work(work: Callable[[BlockShape, DataShape], Work], run: Run) -> Work:
    blocks = run.model.blocks
    return work(blocks[0], run.data) if blocks else Work(changes=False)
