"""Proof by experiment that the residual stream can be rotated.

A row vector x of the stream becomes x·R with R orthogonal (QuaRot, arXiv 2404.00456, section 4).
The gain of a norm is folded into the weights that read the norm before. If norms subtract the mean,
R maps the vector of ones to itself: then mean(x·R) = mean(x), and LayerNorm(x·R) = LayerNorm(x)·R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.torch.graph.block_selection import BlockCall
from quark.torch.graph.replay import (
    TOLERANCE,
    float_tensors,
    output_distance,
    replace_forwards,
    upcast_half,
)
from quark.torch.graph.residency import around, resident
from quark.torch.graph.rotation.residual_stream import ObstacleError
from quark.torch.graph.structure import ResidualStream, StreamWeight, ValueHeads
from quark.torch.graph.trace import iter_tensors

_SEED = 21
_Rotation = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def prove_stream(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[BlockCall]],
    stream: ResidualStream,
    carried: set[int],
) -> None:
    """Prove the rotation of the stream: rotate at random, block by block and around the blocks.

    A rotated block must map rotated inputs to rotated outputs. The rest of the model must compute
    the same logits from rotated outputs of blocks. In the control the readers of the stream are not
    rotated, and the outputs must differ. Half precision is computed in float32.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        run: Runs the model once.
        blocks: The recorded calls of each block in one run.
        stream: The stream to prove.
        carried: Numbers of the tensors that hold vectors of the stream.

    Raises:
        ObstacleError: The proof failed; the message says where and by how much.
    """
    generator = torch.Generator().manual_seed(_SEED)
    keeps_mean = any(norm.kind == "layer" for norm in stream.norms)
    rotation = _random_rotation(stream.size, keeps_mean, generator)
    for block in ["", *blocks]:
        part = _restrict_to_block(stream, block, blocks)
        modules = {name: model.get_submodule(name) for name in blocks}
        if block:
            scope = list(modules[block].modules())
        else:
            inside = {id(m) for b in modules.values() for m in b.modules()}
            scope = [m for m in model.modules() if id(m) not in inside]
        used = [block] if block else around(model, blocks)
        try:
            with resident(model, *used), _make_editable(scope):
                if block:
                    attempt = _BlockReplay(modules[block], blocks[block], carried, rotation)
                    error, control = _measure_rotation(model, part, rotation, attempt, generator)
                else:
                    with _SurroundingReplay(model, run, modules, blocks, carried, rotation) as rest:
                        error, control = _measure_rotation(model, part, rotation, rest, generator)
        except Exception as problem:  # anything that a model can raise
            where = block or "the part around the blocks"
            raise ObstacleError(f"{where} does not run rotated: {problem}") from problem
        if not error <= TOLERANCE * control:
            raise ObstacleError(
                f"rotating {block or 'the part around the blocks'} changes its output by "
                f"{error:.1e}, compared with {control:.1e} if the readers are not rotated"
            )


@torch.no_grad()
def prove_value_heads(
    model: nn.Module, blocks: dict[str, list[BlockCall]], values: Iterable[ValueHeads]
) -> tuple[ValueHeads, ...]:
    """Keep the attention heads whose values can be rotated without changing the block's output.

    In the control, the output projection is not rotated, and the output must change.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        blocks: The recorded calls of each block in one run.
        values: The heads to prove.
    """
    generator = torch.Generator().manual_seed(_SEED)
    proved = []
    for heads in values:
        module = model.get_submodule(heads.block)
        rotation = _random_rotation(heads.rows.shape[1], False, generator)
        attempt = _BlockReplay(module, blocks[heads.block], set(), rotation)
        try:
            with resident(model, heads.block), _make_editable(module.modules()):
                expected = attempt(False)
                for parameter, axis in heads.sources:
                    _rotate_parameter(model, parameter, axis, rotation, heads.rows)
                control = output_distance(attempt(True), expected)
                _rotate_parameter(model, *heads.output, rotation, heads.columns)
                error = output_distance(attempt(True), expected)
        except Exception:  # anything that a model can raise
            continue
        if error <= TOLERANCE * control and control > 0:
            proved.append(heads)
    return tuple(proved)


def _random_orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator, device="cpu")
    rotation: torch.Tensor = torch.linalg.qr(normal)[0]
    return rotation


def _random_rotation(size: int, keeps_ones: bool, generator: torch.Generator) -> _Rotation:
    """Return a function that rotates the vectors along the last axis of a tensor at random.

    Groups of up to 64 randomly chosen entries are rotated, which is cheaper than a full rotation
    and detects the same errors. An axis of several vectors in a row is split into them.

    Args:
        size: Length of a vector.
        keeps_ones: Whether the vector of ones must be mapped to itself.
        generator: Source of random numbers.
    """
    width = next(n for n in range(min(64, size), 0, -1) if size % n == 0)
    block = _random_orthogonal(width if width > 8 else size, generator)
    order = torch.randperm(size, generator=generator, device="cpu")
    mirror: torch.Tensor | None = None

    def rotation(x: torch.Tensor) -> torch.Tensor:
        vectors = x.reshape(*x.shape[:-1], -1, size)[..., order.to(x.device)]
        groups = vectors.view(*vectors.shape[:-1], -1, len(block))
        rotated = torch.matmul(groups, block.to(x)).flatten(-2)
        if mirror is not None:
            across = mirror.to(x)
            rotated = rotated - 2 * (rotated @ across).unsqueeze(-1) * across
        return rotated.flatten(-2)

    # Example of keeps_ones: the rotation maps the ones to some v of the same length. The reflection
    # along v - ones (Householder) maps v back to the ones, and is orthogonal too.
    if keeps_ones:
        ones = torch.ones(size, dtype=torch.float64, device="cpu")
        mirror = torch.nn.functional.normalize(rotation(ones) - ones, dim=0)
    return rotation


def _restrict_to_block(stream: ResidualStream, block: str, blocks: Iterable[str]) -> ResidualStream:
    """Return the part of the stream inside of a block, or outside of all blocks for ""."""

    def lies_here(name: str) -> bool:
        home = next((b for b in blocks if f"{name}.".startswith(f"{b}.")), "")
        return home == block

    def part(weights: tuple[StreamWeight, ...]) -> tuple[StreamWeight, ...]:
        return tuple(weight for weight in weights if lies_here(weight.parameter))

    return replace(
        stream,
        embeddings=part(stream.embeddings),
        writers=part(stream.writers),
        biases=part(stream.biases),
        readers=part(stream.readers),
        norms=tuple(norm for norm in stream.norms if lies_here(norm.module)),
        value_heads=tuple(heads for heads in stream.value_heads if heads.block == block),
        tied=stream.tied and not block,
    )


def _measure_rotation(
    model: nn.Module,
    part: ResidualStream,
    rotation: _Rotation,
    attempt: Callable[[bool], list[torch.Tensor]],
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return the distances of the outputs from the expected ones: rotated, and in the control."""
    expected = attempt(False)
    if part.tied:
        head: Any = model.get_submodule(part.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _fold_gains(model, part)
    for source in [*part.embeddings, *part.writers, *part.biases]:
        _rotate_parameter(model, source.parameter, source.axis, rotation)
    if part.readers:
        control = output_distance(attempt(True), expected)
    else:
        control = output_distance(expected, [torch.zeros_like(t) for t in expected])
    for reader in part.readers:
        _rotate_parameter(model, reader.parameter, reader.axis, rotation)
    for norm in part.norms:
        if norm.bias is not None:
            _rotate_parameter(model, norm.bias, 0, rotation)
    for heads in part.value_heads:
        own = _random_rotation(heads.rows.shape[1], False, generator)
        for parameter, axis in heads.sources:
            _rotate_parameter(model, parameter, axis, own, heads.rows)
        _rotate_parameter(model, *heads.output, own, heads.columns)
    return output_distance(attempt(True), expected), control


def _fold_gains(model: nn.Module, part: ResidualStream) -> None:
    """Fold the gains of norms into the weights that read the norms."""
    for norm in part.norms:
        if norm.weight is None:
            continue
        weight = model.get_parameter(norm.weight)
        gain = weight.data + norm.offset
        for reader in part.readers:
            if reader.norm == norm.module:
                value = model.get_parameter(reader.parameter).data
                value.movedim(reader.axis, -1).mul_(gain)
        weight.data.fill_(1.0 - norm.offset)
        if norm.bias is not None:
            model.get_parameter(norm.bias).data.div_(gain)


def _rotate_parameter(
    model: nn.Module,
    parameter: str,
    axis: int,
    rotation: _Rotation,
    positions: torch.Tensor | None = None,
) -> None:
    """Rotate the vectors along an axis of a parameter, or those at some positions of the axis."""
    value = model.get_parameter(parameter).data.movedim(axis, -1)
    if positions is None:
        value.copy_(rotation(value))
    else:
        value[..., positions] = rotation(value[..., positions])


def _rotate_carried(
    tree: Any, numbers: Sequence[int], carried: set[int], rotation: _Rotation
) -> Any:
    """Return nested tensors in float32 at least, with vectors of the stream rotated."""
    left = iter(numbers)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return rotation(upcast_half(leaf)) if next(left) in carried else upcast_half(leaf)

    return tree_map(change, tree)


class _BlockReplay:
    """Repeats the calls of a block.

    Called with True, it rotates the inputs and returns the outputs. Called with False, it returns
    the expected outputs: those of the original inputs, rotated.
    """

    def __init__(
        self, module: nn.Module, calls: Sequence[BlockCall], carried: set[int], rotation: _Rotation
    ) -> None:
        self._module, self._calls = module, calls
        self._carried, self._rotate = carried, rotation

    def __call__(self, is_rotated: bool) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        for call in self._calls:
            rotated_inputs = self._carried if is_rotated else set()
            args, kwargs = _rotate_carried(
                (call.args, call.kwargs), call.input_numbers, rotated_inputs, self._rotate
            )
            output = self._module(*args, **kwargs)
            rotated_outputs = set() if is_rotated else self._carried
            outputs += iter_tensors(
                _rotate_carried(output, call.output_numbers, rotated_outputs, self._rotate)
            )
        return float_tensors(outputs)


class _SurroundingReplay:
    """Runs a model whose blocks return recorded outputs, and records their inputs and the logits.

    Called with True, the recorded outputs are rotated. Called with False, the inputs of blocks are
    rotated as they are recorded: these are the expected ones.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], object],
        modules: dict[str, nn.Module],
        blocks: dict[str, list[BlockCall]],
        carried: set[int],
        rotation: _Rotation,
    ) -> None:
        self._model, self._run, self._modules = model, run, modules
        self._blocks, self._carried, self._rotate = blocks, carried, rotation
        self._recorded: list[torch.Tensor] = []
        self._is_rotated = False

    def __enter__(self) -> _SurroundingReplay:
        self._stack = ExitStack()
        forwards = {name: self._recall_outputs(self._blocks[name]) for name in self._modules}
        self._stack.enter_context(replace_forwards(self._model, forwards))
        handle = self._model.register_forward_hook(self._record_results)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, is_rotated: bool) -> list[torch.Tensor]:
        self._recorded, self._is_rotated = [], is_rotated
        self._run()
        return self._recorded

    def _record_results(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recorded += float_tensors(output)

    def _recall_outputs(self, calls: Sequence[BlockCall]) -> Callable[..., Any]:
        waiting: list[BlockCall] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            waiting.extend(() if waiting else calls)
            call = waiting.pop(0)
            x = upcast_half(next(iter_tensors((args, kwargs))))
            self._recorded.append(x if self._is_rotated else self._rotate(x))
            rotated = self._carried if self._is_rotated else set()
            return _rotate_carried(call.output, call.output_numbers, rotated, self._rotate)

        return forward


@contextmanager
def _make_editable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make parameters editable copies in float32 at least, and restore them afterwards."""
    saved = [(module, dict(module._parameters)) for module in modules]
    tensors = {id(t): t for m, _ in saved for t in [*m.parameters(False), *m.buffers(False)]}
    data = [(tensor, tensor.data) for tensor in tensors.values()]
    try:
        for tensor, value in data:
            if value.is_floating_point():
                wide = torch.promote_types(value.dtype, torch.float32)
                tensor.data = value.to(wide, copy=True)
        yield
    finally:
        for module, parameters in saved:
            module._parameters.clear()
            module._parameters.update(parameters)
        for tensor, value in data:
            tensor.data = value
