"""Proof by trying that the residual stream may be rotated.

Row vectors: a vector x of the stream becomes x·R (QuaRot, arXiv 2404.00456, section 4). What a norm
multiplies by is moved into what reads it before. Where norms take the mean away, R keeps the vector
of ones and with it the mean, so that the norm of x·R is that of x times R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.torch.graph.rescaling.proof import TOLERANCE, distance, floats, lifted
from quark.torch.graph.rotation.residual_stream import ObstacleError
from quark.torch.graph.structure import ResidualStream, StreamWeight, ValueHeads
from quark.torch.graph.trace import Call, tensors

_SEED = 21
_Turn = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def prove_stream(
    model: nn.Module,
    run: Callable[[], object],
    blocks: dict[str, list[Call]],
    stream: ResidualStream,
    carried: set[int],
) -> None:
    """Rotate the stream at random, block by block and around the blocks.

    What blocks give must be rotated, and the logits must be the same. If what reads the stream is
    left as it is, they must not. Half precision is lifted to single meanwhile.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        run: Runs the model once.
        blocks: The recorded calls of each block in one run.
        stream: What is to be proved.
        carried: Numbers of the tensors that hold vectors of the stream.

    Raises:
        ObstacleError: The proof failed; the message says where and by how much.
    """
    generator = torch.Generator().manual_seed(_SEED)
    keeps_mean = any(norm.kind == "layer" for norm in stream.norms)
    turn = _random_turn(stream.size, keeps_mean, generator)
    for block in ["", *blocks]:
        part = _part(stream, block, blocks)
        modules = {name: model.get_submodule(name) for name in blocks}
        if block:
            scope = list(modules[block].modules())
        else:
            inside = {id(m) for b in modules.values() for m in b.modules()}
            scope = [m for m in model.modules() if id(m) not in inside]
        try:
            with _changeable(scope):
                if block:
                    attempt = _Block(modules[block], blocks[block], carried, turn)
                    error, control = _try(model, part, turn, attempt, generator)
                else:
                    with _Surroundings(model, run, modules, blocks, carried, turn) as around:
                        error, control = _try(model, part, turn, around, generator)
        except Exception as problem:  # anything that a model can raise
            where = block or "what surrounds the blocks"
            raise ObstacleError(f"{where} does not run rotated: {problem}") from problem
        if not error <= TOLERANCE * control:
            raise ObstacleError(
                f"rotating {block or 'what surrounds the blocks'} changes what it computes: "
                f"{error:.1e}, against {control:.1e} if what reads the stream is left as it is"
            )


@torch.no_grad()
def prove_values(
    model: nn.Module, blocks: dict[str, list[Call]], values: Iterable[ValueHeads]
) -> tuple[ValueHeads, ...]:
    """Keep the heads of values that can be rotated at random, and their block gives the same.

    It must give something else if the output projection is left as it is.

    Args:
        model: The model. It is unchanged in the end, bit by bit.
        blocks: The recorded calls of each block in one run.
        values: What is to be proved.
    """
    generator = torch.Generator().manual_seed(_SEED)
    proved = []
    for heads in values:
        module = model.get_submodule(heads.block)
        turn = _random_turn(heads.rows.shape[1], False, generator)
        attempt = _Block(module, blocks[heads.block], set(), turn)
        try:
            with _changeable(module.modules()):
                expected = attempt(False)
                for parameter, axis in heads.sources:
                    _rotate(model, parameter, axis, turn, heads.rows)
                control = distance(attempt(True), expected)
                _rotate(model, *heads.output, turn, heads.columns)
                error = distance(attempt(True), expected)
        except Exception:  # anything that a model can raise
            continue
        if error <= TOLERANCE * control and control > 0:
            proved.append(heads)
    return tuple(proved)


def _random_rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator)
    rotation: torch.Tensor = torch.linalg.qr(normal)[0]
    return rotation


def _random_turn(size: int, keeps_ones: bool, generator: torch.Generator) -> _Turn:
    """Return a rotation of vectors: of random groups of up to 64 entries, which is enough to tell.

    It turns every vector of those that lie along the last axis of a tensor.

    Args:
        size: Length of the vectors.
        keeps_ones: Let it keep the vector of ones: a reflection brings that back.
        generator: Where chance comes from.
    """
    width = next(n for n in range(min(64, size), 0, -1) if size % n == 0)
    block = _random_rotation(width if width > 8 else size, generator)
    order = torch.randperm(size, generator=generator)
    mirror: torch.Tensor | None = None

    def turn(x: torch.Tensor) -> torch.Tensor:
        vectors = x.reshape(*x.shape[:-1], -1, size)[..., order.to(x.device)]
        groups = vectors.view(*vectors.shape[:-1], -1, len(block))
        turned = torch.matmul(groups, block.to(x)).flatten(-2)
        if mirror is not None:
            across = mirror.to(x)
            turned = turned - 2 * (turned @ across).unsqueeze(-1) * across
        return turned.flatten(-2)

    if keeps_ones:
        ones = torch.ones(size, dtype=torch.float64)
        mirror = torch.nn.functional.normalize(turn(ones) - ones, dim=0)
    return turn


def _part(stream: ResidualStream, block: str, blocks: Iterable[str]) -> ResidualStream:
    """Return the part of the stream that lies in a block, or outside of all."""

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
        values=tuple(heads for heads in stream.values if heads.block == block),
        tied=stream.tied and not block,
    )


def _try(
    model: nn.Module,
    part: ResidualStream,
    turn: _Turn,
    attempt: Callable[[bool], list[torch.Tensor]],
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return how far a rotated part is from what it should give, and is if readers are not."""
    expected = attempt(False)
    if part.tied:
        head: Any = model.get_submodule(part.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    _fold(model, part)
    for source in [*part.embeddings, *part.writers, *part.biases]:
        _rotate(model, source.parameter, source.axis, turn)
    if part.readers:
        control = distance(attempt(True), expected)
    else:
        control = distance(expected, [torch.zeros_like(t) for t in expected])
    for reader in part.readers:
        _rotate(model, reader.parameter, reader.axis, turn)
    for norm in part.norms:
        if norm.bias is not None:
            _rotate(model, norm.bias, 0, turn)
    for heads in part.values:
        own = _random_turn(heads.rows.shape[1], False, generator)
        for parameter, axis in heads.sources:
            _rotate(model, parameter, axis, own, heads.rows)
        _rotate(model, *heads.output, own, heads.columns)
    return distance(attempt(True), expected), control


def _fold(model: nn.Module, part: ResidualStream) -> None:
    """Move what norms multiply by into what reads them."""
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


def _rotate(
    model: nn.Module,
    parameter: str,
    axis: int,
    turn: _Turn,
    places: torch.Tensor | None = None,
) -> None:
    """Rotate the vectors along an axis, or those that lie at some places along it."""
    value = model.get_parameter(parameter).data.movedim(axis, -1)
    if places is None:
        value.copy_(turn(value))
    else:
        value[..., places] = turn(value[..., places])


def _mapped(tree: Any, numbers: Sequence[int], carried: set[int], turn: _Turn) -> Any:
    """Return nested tensors, lifted, with those that hold vectors of the stream turned."""
    left = iter(numbers)

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return turn(lifted(leaf)) if next(left) in carried else lifted(leaf)

    return tree_map(change, tree)


class _Block:
    """Repeats the calls of a block, with what it gets rotated or with what it gives rotated."""

    def __init__(
        self, module: nn.Module, calls: Sequence[Call], carried: set[int], turn: _Turn
    ) -> None:
        self._module, self._calls = module, calls
        self._carried, self._turn = carried, turn

    def __call__(self, is_rotated: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for call in self._calls:
            given = self._carried if is_rotated else set()
            args, kwargs = _mapped((call.args, call.kwargs), call.given, given, self._turn)
            output = self._module(*args, **kwargs)
            made = set() if is_rotated else self._carried
            found += tensors(_mapped(output, call.made, made, self._turn))
        return floats(found)


class _Surroundings:
    """Runs a model whose blocks recall what they gave, and notes what they get."""

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], object],
        modules: dict[str, nn.Module],
        blocks: dict[str, list[Call]],
        carried: set[int],
        turn: _Turn,
    ) -> None:
        self._model, self._run, self._modules = model, run, modules
        self._blocks, self._carried, self._turn = blocks, carried, turn
        self._noted: list[torch.Tensor] = []
        self._is_rotated = False

    def __enter__(self) -> _Surroundings:
        self._stack = ExitStack()
        for name, module in self._modules.items():
            module.forward = self._recalling(self._blocks[name])
            self._stack.callback(delattr, module, "forward")
        handle = self._model.register_forward_hook(self._note_results)
        self._stack.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, is_rotated: bool) -> list[torch.Tensor]:
        self._noted, self._is_rotated = [], is_rotated
        self._run()
        return self._noted

    def _note_results(self, module: nn.Module, args: Any, output: Any) -> None:
        self._noted += floats(output)

    def _recalling(self, calls: Sequence[Call]) -> Callable[..., Any]:
        waiting: list[Call] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            waiting.extend(() if waiting else calls)
            call = waiting.pop(0)
            given = lifted(next(tensors((args, kwargs))))
            self._noted.append(given if self._is_rotated else self._turn(given))
            turned = self._carried if self._is_rotated else set()
            return _mapped(call.output, call.made, turned, self._turn)

        return forward


@contextmanager
def _changeable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let parameters be changed for a while, in single precision at least."""
    saved = [(module, dict(module._parameters)) for module in modules]
    held = {id(t): t for m, _ in saved for t in [*m.parameters(False), *m.buffers(False)]}
    data = [(tensor, tensor.data) for tensor in held.values()]
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
