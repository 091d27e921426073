"""Logits of a language model, for a part of the positions at a time.

A batch of 8 windows of 2048 tokens has 4.2 GB of logits in a vocabulary of 128 thousand. So the
rest of a model runs once for a batch, and its output head, with what the model computes from the
outputs of the head, for a few positions at a time::

    model.model(tokens)     recorded when it runs first, then replayed     (8, 2048, hidden)
    model.lm_head           receives the positions 0..31, then 32..63, …   (8, 32, hidden)
    model(tokens)           what it returns is the logits of these         (8, 32, vocabulary)

The first batch proves that this is the output of the whole model: hidden states of other positions
do not change the logits of a position, and its place among them does not. A model without such a
head runs whole, and its logits are passed on in the same parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.graph.replay import replace_forwards
from quark.torch.quantization.config.resolution import output_head

ROWS_AT_ONCE = 256  # positions of all windows together that the head receives
_STRENGTH = 64.0  # factor of the hidden states that must not matter
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative to the largest logit
_CLOSE_HALF = 2.0**-5

Run = Callable[[], Any]
Receive = Callable[[int, torch.Tensor], None]
Select = Callable[[torch.Tensor], torch.Tensor]


class OutputHead:
    """The output head of a model, which runs on parts of a batch.

    Args:
        model: A language model. It is not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        names = [] if _is_compiled(model) else output_head(model)
        self._name = names[0] if len(names) == 1 else None
        self._is_proved: bool | None = None

    def run(self, run: Run, tokens: torch.Tensor, receive: Receive) -> None:
        """Run the model on a batch.

        Args:
            run: Runs the model on the batch and returns its output.
            tokens: The batch, (windows, length).
            receive: Takes the logits of successive parts: the first position of each, and logits
                (windows, positions, vocabulary).

        Raises:
            ValueError: The model returns no logits.
        """
        step = max(1, ROWS_AT_ONCE // len(tokens))
        starts = range(0, tokens.shape[1], step)
        if self._name is None or self._is_proved is False or len(starts) == 1:
            self._run_whole(run, step, receive)
            return
        parts = _Parts(self._model, self._name, run, tokens.shape)
        with parts.ready():
            if self._is_proved is None:
                self._is_proved = parts.prove()
            if self._is_proved:
                for start in starts:
                    receive(start, parts.logits(_slice(start, start + step)))
                return
        self._run_whole(run, step, receive)

    def _run_whole(self, run: Run, step: int, receive: Receive) -> None:
        logits = logits_of(run())
        for start in range(0, logits.shape[1], step):
            receive(start, logits[:, start : start + step])


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch compiles a part of a model, which then always runs whole."""
    is_wrapped = isinstance(getattr(model, "_orig_mod", None), nn.Module)
    return is_wrapped or any(m._compiled_call_impl is not None for m in model.modules())


def _slice(start: int, end: int) -> Select:
    return lambda x: x[:, start:end]


class _Unfit(RuntimeError):
    """The head does not receive the hidden states of all positions."""


class _Parts:
    """Runs of a model for one batch; what does not depend on the head runs once.

    Args:
        model: The model.
        head: Name of the head.
        run: Runs the model on the batch.
        shape: Shape of the batch, (windows, length).
    """

    def __init__(self, model: nn.Module, head: str, run: Run, shape: torch.Size) -> None:
        self._model, self._head, self._run, self._shape = model, head, run, shape
        self._module = model.get_submodule(head)
        self._select: Select = _slice(0, 0)
        self._has_run = False  # the head, in the current run
        self._is_inside = False  # of a module whose output is recorded
        self._outputs: dict[str, list[Any]] = defaultdict(list)
        self._calls: dict[str, int] = defaultdict(int)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the head receive parts, and let other modules replay, while the context is open."""
        names = _beside(self._model, self._head)
        forwards = {name: self._replay(name) for name in names}
        # The first of the hooks, so that others observe what the head computes with.
        hook = self._module.register_forward_pre_hook(self._cut, prepend=True, with_kwargs=True)
        try:
            with replace_forwards(self._model, forwards):
                yield
        finally:
            hook.remove()

    def _cut(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the hidden states among the arguments of the head by a part of them."""
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[:2] != self._shape:
            raise _Unfit
        self._has_run = True
        # Products of tensors that are not contiguous can have other bits.
        return (self._select(x).contiguous(), *args[1:]), kwargs

    def _replay(self, name: str) -> Callable[..., Any]:
        """Return a forward that returns in each run what it returned in the first one.

        It runs after the head, and inside of another one that runs.
        """
        own, outputs = self._model.get_submodule(name).forward, self._outputs[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._has_run or self._is_inside:
                return own(*args, **kwargs)
            number = self._calls[name]
            self._calls[name] += 1
            if number == len(outputs):
                self._is_inside = True
                try:
                    outputs.append(own(*args, **kwargs))
                finally:
                    self._is_inside = False
            return outputs[number]

        return forward

    def logits(self, select: Select) -> torch.Tensor:
        """Return logits.

        Args:
            select: Takes the hidden states that enter the head, (windows, length, hidden), and
                returns those to run it on, (windows, positions, hidden).
        """
        self._calls.clear()
        self._select, self._has_run = select, False
        return logits_of(self._run())

    def prove(self) -> bool:
        """Return whether the logits of a position depend on its own hidden states alone.

        The last two positions run together, again with one of them made large, which must not
        change a bit of the other, and in reverse order. Hooks of others do not see this.
        """
        pair = _slice(self._shape[1] - 2, self._shape[1])
        factors = torch.tensor([1.0, _STRENGTH], dtype=torch.float32, device="cpu")
        try:
            with self._unobserved():
                logits = self.logits(pair)
                if logits.shape[:2] != (self._shape[0], 2):
                    return False
                other = self.logits(lambda x: pair(x) * factors.to(x)[:, None])
                turned = self.logits(lambda x: pair(x).flip(1))
        except (RuntimeError, ValueError):  # such as shapes that do not fit
            return False
        allowed = _CLOSE.get(logits.dtype, _CLOSE_HALF) * logits.abs().max()
        is_close = bool(((turned.flip(1) - logits).abs() <= allowed).all())
        return torch.equal(logits[:, 0], other[:, 0]) and is_close

    @contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Keep hooks of others on the head from running while the context is open."""
        tables = [self._module._forward_pre_hooks, self._module._forward_hooks]
        every = [dict(table) for table in tables]
        own, (first, *_) = tables[0], every[0].items()
        for table in tables:
            table.clear()
        own[first[0]] = first[1]
        try:
            yield
        finally:
            for table, hooks in zip(tables, every, strict=True):
                table.clear()
                table.update(hooks)


def _beside(model: nn.Module, head: str) -> Iterator[str]:
    """Iterate over the modules that do not hold the head, from the outside to the inside.

    Some models call ``model.decoder`` without ``model``, so those inside of others are among them.
    Only inside of the members of lists, such as decoder blocks, nothing is called from outside.
    """
    members = {id(m) for x in model.modules() if isinstance(x, nn.ModuleList) for m in x}

    def visit(name: str, module: nn.Module) -> Iterator[str]:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if path == head:
                continue
            is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if not (is_list or head.startswith(f"{path}.")):
                yield path
            if id(child) not in members:
                yield from visit(path, child)

    return visit("", model)


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in the output of a model, (batch, length, vocabulary).

    Raises:
        ValueError: There are none.
    """
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple):
        output = output[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        shape = getattr(logits, "shape", None)
        raise ValueError(
            f"the model returned {type(logits).__name__} of shape {shape}; expected logits "
            "(batch, length, vocabulary) of a causal language model"
        )
    return logits
