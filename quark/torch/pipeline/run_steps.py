"""The steps of a run, and what each takes: memory, activations, arithmetic and passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quark.torch.pipeline.shapes import (
    FLOAT32,
    PASS_READS,
    BlockShape,
    DataShape,
    ModelShape,
    Work,
    windows_at_once,
)

_ROWS = 256  # tokens that the output head receives at once in an evaluation
ELEMENT_FLOPS = 100.0  # elementwise steps that quantize a value, in units of arithmetic
# Tracing a graph is work of the interpreter: seconds of one core of an AMD Zen 3, and bytes of the
# libraries and of the nodes of a layer.
TRACE_SECONDS, TRACE_IMPORTS = 6.0, 128 << 20
LAYER_SECONDS, CACHED_LAYER_SECONDS, LAYER_NODES = 0.2, 0.35, 1 << 20
GRAPH_WEIGHTS = 4  # tensors in float32 that the graph of a finish holds for each weight

StepWork = Callable[[BlockShape, DataShape], Work]  # what a step takes for a block


class Step(NamedTuple):
    """A step of a run.

    Attributes:
        name: What is done.
        memory: Bytes that it takes beside the parameters, where these are.
        stores: Bytes of activations that it holds in main memory.
        flops: Arithmetic in the type of the model.
        solver_flops: Arithmetic in float32.
        reads: Times that the parameters are read from the files, if memory does not hold them.
        passes: Times that the data runs through the model.
        seconds: Time of work that is no arithmetic.
    """

    name: str
    memory: int = 0
    stores: int = 0
    flops: float = 0.0
    solver_flops: float = 0.0
    reads: int = 1
    passes: float = 0.0
    seconds: float = 0.0


class Finish(NamedTuple):
    """A finish that trains some parameters against the predictions of the original.

    Attributes:
        sequences: Number of sequences of its data.
        trained: Sequences that gradients are computed for, each as often as it is.
        judged: Sequences that are measured, likewise.
        parameters: Number of values that train, at most.
    """

    sequences: int
    trained: int
    judged: int
    parameters: int


class Run(NamedTuple):
    """A run whose requirements are asked for.

    Attributes:
        model: The model.
        data: The calibration data; no tokens without any.
        algorithms: Name of each algorithm and what it takes for a block, in order.
        proves: How many kinds of structure are proved: rescalings, rotations.
        is_static: Whether ranges of activations are found by running the data.
        attends: Times that attention is computed on the data to choose scales of the cache.
        output: Bytes of the checkpoints.
        packed: Bytes of the tensors that one of them holds and the model does not.
        evaluated: Tokens of an evaluation, 0 for none.
        evaluated_batch: Most tokens of a batch of it.
        evaluated_window: Tokens of a window of it.
        evaluation_results: Bytes of each kind of results of it that stay in stores, each up to half
            of the limit of activations.
        predictions: Bytes of the predictions that other models are compared with, up to half of the
            limit; where models take turns, they are dropped then.
        interleaved: Number of models that take turns if they are read in parts.
        processes: Number of processes that share the work.
        devices: Number of devices of this process that share it.
        on_device: Whether the model runs on a device with memory of its own.
        through_files: Whether tensors go from files to files, without a model in memory.
        threads: Number of threads that do so.
        rounds: Whether an algorithm rounds all layers, so that they need no scales afterwards.
        quantizes: Whether the model is quantized and written. Otherwise it is only measured.
        unpacks: Whether its weights are packed, and unpacked for each use.
        tokenizer: Bytes that reading the tokenizer takes once more, for a file that holds it; 0 if
            none does.
        tokenizer_loading: Bytes that loading the tokenizer takes, before the model is loaded.
        traces: Whether a graph is traced and written, in one piece.
        traces_cache: Whether that graph has a cache.
        finish: The finish after quantization; None without.
    """

    model: ModelShape
    data: DataShape
    algorithms: Sequence[tuple[str, StepWork]]
    proves: int
    is_static: bool
    output: int
    packed: int
    evaluated: int = 0
    evaluated_batch: int = 0
    evaluated_window: int = 1
    evaluation_results: tuple[int, ...] = ()
    predictions: int = 0
    interleaved: int = 1
    processes: int = 1
    devices: int = 1
    on_device: bool = False
    through_files: bool = False
    threads: int = 1
    rounds: bool = False
    quantizes: bool = True
    unpacks: bool = False
    attends: int = 0
    tokenizer: int = 0
    tokenizer_loading: int = 0
    traces: bool = False
    traces_cache: bool = False
    finish: Finish | None = None


def list_steps(run: Run, limit: int, streams: bool) -> list[Step]:
    """Return the steps of a run, in order.

    Args:
        run: The run.
        limit: Bytes of activations that may stay in memory.
        streams: Whether parameters are read when they are used.
    """
    if not run.quantizes:
        return _list_measurements(run, limit, streams)
    model, data = run.model, run.data
    evaluation = _evaluation(run, streams, limit)
    steps = [evaluation._replace(name="evaluation of the original")] if evaluation else []
    if run.algorithms:
        steps.append(_structure(run))
    # Values of a changed part are copied when they leave memory.
    leaving = 2 * max((block.changed for block in model.blocks), default=0) if streams else 0
    steps += [_algorithm(run, *entry, limit, streams, leaving) for entry in run.algorithms]
    element = FLOAT32 * model.largest_weight
    quantize = ELEMENT_FLOPS * sum(layer.elements for layer in model.layers)
    reads = 0 if run.rounds else 1  # of layers that no algorithm has rounded
    steps.append(Step("scales of weights", 8 * element, solver_flops=quantize, reads=reads))
    if run.is_static:
        stores = _held(data.hidden_states, 3, limit) if streams else 0
        memory = _pass_memory(run, not streams)
        flops = _model_flops(model, data)
        steps.append(Step("ranges of activations", memory, stores, flops, 0.0, PASS_READS, 1.0))
        if run.attends:
            # Products of queries and keys, and of probabilities and values.
            once = 4.0 * data.tokens * data.length * data.hidden * data.blocks
            flops += run.attends * once
            steps.append(Step("scales of the cache", memory, stores, flops, 0.0, PASS_READS, 1.0))
    steps.append(Step("rounding", 8 * element + leaving, solver_flops=quantize, reads=reads))
    steps += [] if run.finish is None else [_finish(run, run.finish, limit, streams)]
    steps += [evaluation] if evaluation else []
    if run.tokenizer:
        steps.append(Step("reading the tokenizer", run.tokenizer, reads=0))
    packed = max((b.elements for b in model.blocks), default=0) if streams else run.packed
    steps.append(Step("writing", 8 * element + packed, solver_flops=quantize))
    if run.traces:
        steps.append(_tracing(run))
    return steps


def _finish(run: Run, finish: Finish, limit: int, streams: bool) -> Step:
    """Return the step that trains parameters against the predictions of the original.

    Each sequence runs alone. The graph holds the tensors of a sequence, and of each weight its
    values before and after the trained scales, these scales expanded, and gradients. Of a model
    that is read in parts there is the graph of one block, which runs once more for it. Each
    parameter has a gradient, two moments, and its values at the start and at the best step. The
    original predicts a sequence once if the limit of activations has room for its logits.
    """
    model, data = run.model, run.data
    one = data._replace(tokens=data.length, batch=data.length)
    hidden = [16 * data.hidden + 4 * sum(x.outputs for x in b.layers) for b in model.blocks]
    graphs = [
        FLOAT32 * (data.length * width + GRAPH_WEIGHTS * block.elements)
        for width, block in zip(hidden, model.blocks, strict=True)
    ]
    graph = (max if streams else sum)([0, *graphs])
    logits = (2 * data.itemsize + 6 * FLOAT32) * one.batch * data.labels
    state = 6 * FLOAT32 * finish.parameters
    kept = min(finish.sequences, limit // max(one.logits, 1))
    asked = finish.judged + finish.trained
    predicted = kept + math.ceil(asked * (1 - kept / max(finish.sequences, 1)))
    count = predicted + finish.judged + (3 + streams) * finish.trained
    return Step(
        "distillation",
        graph + logits + state + _pass_memory(run._replace(data=one), True),
        kept * one.logits,
        flops=count * _model_flops(model, one),
        reads=predicted + finish.judged + 2 * finish.trained,
        passes=count * data.length / max(data.tokens, 1),
    )


def _tracing(run: Run) -> Step:
    """Return the step that traces a graph, fills it with codes and writes it.

    Beside the original weights, which a failure restores, memory holds codes in the order of the
    layers and in that of the graph, a byte each, and the file three times.
    """
    layers = run.model.layers
    values = sum((layer.itemsize + 2) * layer.elements for layer in layers)
    each = CACHED_LAYER_SECONDS if run.traces_cache else LAYER_SECONDS
    return Step(
        "tracing the graph",
        TRACE_IMPORTS + LAYER_NODES * len(layers) + values + 3 * run.output,
        reads=0,
        seconds=TRACE_SECONDS + each * len(layers),
    )


def _list_measurements(run: Run, limit: int, streams: bool) -> list[Step]:
    """Return the steps of a run that changes nothing."""
    evaluation = _evaluation(run, streams, limit)
    steps = [] if evaluation is None else [evaluation]
    steps += [_algorithm(run, *entry, limit, streams, leaving=0) for entry in run.algorithms]
    results = (*run.evaluation_results, run.predictions)
    kept = sum(min(size, limit // 2) for size in results)
    return [s._replace(stores=s.stores + kept) for s in steps] or [Step("loading")]


def _algorithm(
    run: Run,
    name: str,
    work: StepWork,
    limit: int,
    streams: bool,
    leaving: int,
) -> Step:
    """Return the step of an algorithm.

    Args:
        run: The run.
        name: Name of the algorithm.
        work: What it takes for a block.
        limit: Bytes of activations that may stay in memory.
        streams: Whether parameters are read when they are used.
        leaving: Bytes that a block takes while its changed values are written.
    """
    data, blocks = run.data, run.model.blocks
    per_block = [work(block, data) for block in blocks] or [Work()]
    held = min(sum(w.held for w in per_block), limit)
    stores = max(w.stores for w in per_block)
    head = not streams and any(w.runs_model for w in per_block)
    passed = sum(w.passes * _pass_flops(b, data) for w, b in zip(per_block, blocks, strict=False))
    return Step(
        name,
        max(w.memory + max(_pass_memory(run, head) + leaving, w.solving) for w in per_block),
        _held(data.hidden_states, stores, limit) + held,
        passed,
        sum(w.flops for w in per_block),
        max(w.reads for w in per_block),
        max(w.passes for w in per_block),
    )


def _structure(run: Run) -> Step:
    """Return the step that finds and proves the structure of the model.

    Proofs run a block, or what is around the blocks, in float32 with changed copies of weights.
    """
    model = run.model
    memory = 0
    if run.proves:
        weights = [sum(x.elements for x in block.layers) for block in model.blocks]
        memory = FLOAT32 * max(model.around + 4 * model.around_largest, 3 * max(weights, default=0))
    return Step("structure", memory, solver_flops=64.0 * model.size, reads=1 + run.proves)


def _evaluation(run: Run, streams: bool, limit: int) -> Step | None:
    """Return the step that measures perplexity, or None."""
    if not run.evaluated:
        return None
    batch, window = run.evaluated_batch, run.evaluated_window
    if streams:
        batch = window * windows_at_once(batch // window, window, _widest(run), limit)
    data = run.data._replace(tokens=run.evaluated, batch=batch, length=window)
    # Logits of a part of the batch, in float32 too, and two copies for the likelihood.
    own = data.itemsize if data.itemsize < FLOAT32 else 0
    parts = (own + 3 * FLOAT32) * min(_ROWS, data.batch) * data.labels
    reordered = data.itemsize * run.model.around_largest if data.itemsize < FLOAT32 else 0
    head = parts + reordered + 3 * FLOAT32 * data.batch * data.hidden
    unpacked = 2 * FLOAT32 * run.model.largest_weight if run.unpacks else 0
    memory = max(head, _pass_memory(run._replace(data=data), False) + unpacked)
    count = run.interleaved
    stores = count * _held(data.hidden_states, 3, limit // count) if streams else 0
    flops = _model_flops(run.model, data)
    return Step("evaluation", memory, stores, flops, reads=PASS_READS)


def _pass_memory(run: Run, uses_head: bool) -> int:
    """Return the bytes that a forward pass of a batch takes.

    Products in half precision reorder the weight first, which copies it.

    Args:
        run: The run.
        uses_head: Whether the output head runs; it does too where layers outside of the blocks are
            quantized. Else the pass ends after the last block.
    """
    data, model = run.data, run.model
    uses_head = uses_head or bool(model.quantized_around)
    largest = max(model.around_largest, model.largest_weight) if uses_head else model.largest_weight
    reordered = data.itemsize * largest if data.itemsize < FLOAT32 else 0
    hidden = FLOAT32 * data.batch * (6 * data.hidden + 4 * _widest(run) + data.length)
    return hidden + reordered + uses_head * data.logits


def _widest(run: Run) -> int:
    """Return the outputs of the widest quantized layer."""
    return max((x.outputs for x in run.model.layers), default=run.data.hidden)


def _pass_flops(block: BlockShape, data: DataShape) -> float:
    """Return the arithmetic of a forward pass of all data: weights, and pairs of tokens."""
    return 2.0 * data.tokens * block.active + 4.0 * data.tokens * data.length * data.hidden


def _model_flops(model: ModelShape, data: DataShape) -> float:
    """Return the arithmetic of a forward pass of all data through the model."""
    blocks = sum(_pass_flops(block, data) for block in model.blocks)
    return blocks + 2.0 * data.tokens * model.around_largest


def _held(size: int, stores: int, limit: int) -> int:
    """Return the bytes of hidden states that stores share the limit for hold in memory."""
    return stores * min(size, limit // stores) if stores else 0


def spilled_activations(run: Run, limit: int, streams: bool) -> int:
    """Return the most bytes of activations that are written to temporary files.

    Args:
        run: The run.
        limit: Bytes of activations that may stay in memory.
        streams: Whether parameters are read when they are used.
    """
    size, data = run.data.hidden_states, run.data
    spilled = [3 * size - _held(size, 3, limit)] if run.is_static else [0]
    if streams:
        size_evaluated = data._replace(tokens=run.evaluated).hidden_states
        own = 3 * size_evaluated - _held(size_evaluated, 3, limit // run.interleaved)
        spilled.append(run.interleaved * own)
    for _, work in run.algorithms:
        each = [work(block, data) for block in run.model.blocks]
        stores = max((w.stores for w in each), default=0)
        held = sum(w.held for w in each)
        spilled.append(stores * size - _held(size, stores, limit) + max(held - limit, 0))
    drops = streams and run.interleaved > 1  # predictions, once they were compared
    results = run.evaluation_results if drops else (*run.evaluation_results, run.predictions)
    return max(spilled) + sum(max(kept - limit // 2, 0) for kept in results)
