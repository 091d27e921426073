"""Proof that layers compute the queries and keys of attention, by a forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.graph.eval_mode import eval_mode
from quark.torch.quantization.nn.attention import (
    OTHERWISE,
    AttentionRoute,
    Projections,
    check_routes,
    refusal,
)


def prove_projections(
    model: nn.Module, projections: Mapping[str, Projections], run: Callable[[], None]
) -> None:
    """Prove that layers compute all keys, or queries, and that nothing but attention reads them.

    Each layer returns NaN and attention returns zeros. All keys, or queries, must then be NaN, and
    the output of the model must not: NaN there comes from another reader of the layer.

    Args:
        model: A float model. It is unchanged afterwards.
        projections: Result of ``attention_projections``.
        run: Runs the model once.

    Raises:
        ValueError: A layer computes something else, or another layer reads its output.
    """
    check_routes(model, projections)
    for tensor, kind in (("keys", _KeyTrial), ("queries", _QueryTrial)):
        layers = {name: getattr(found, tensor) for name, found in projections.items()}
        trials = {name: kind(layer) for name, layer in layers.items() if layer is not None}
        leaks = _run_trials(model, trials, run) if trials else False
        for name, trial in trials.items():
            problem = trial.problem if trial.width else f"its {trial.layer} did not run"
            if problem:
                raise refusal(name, tensor, problem)
        if leaks:
            raise refusal(next(iter(trials)), tensor, "other layers read them too")


def _run_trials(model: nn.Module, trials: Mapping[str, _Trial], run: Callable[[], None]) -> bool:
    """Run a model with the trials of its attention modules; return whether its output has NaN."""
    leaks: list[bool] = []
    hooks = [model.register_forward_hook(lambda _, __, output: leaks.append(_has_nan(output)))]
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in trials}
    configs = {name: module.config for name, module in modules.items()}
    try:
        for name, trial in trials.items():
            modules[name].config = _TrialRoute(configs[name], trial)
            hooks.append(modules[name].get_submodule(trial.layer).register_forward_hook(trial.mark))
        with eval_mode(model), torch.no_grad():
            run()
    finally:
        for name, module in modules.items():
            module.config = configs[name]
        for hook in hooks:
            hook.remove()
    return any(leaks)


class _Trial(ABC):
    """A trial of one layer of an attention module.

    Args:
        layer: Its name in the module.

    Attributes:
        width: Number of its outputs; 0 as long as it has not run.
        problem: Why it does not compute what it should, or None.
    """

    def __init__(self, layer: str) -> None:
        self.layer, self.width = layer, 0
        self.problem: str | None = OTHERWISE

    def mark(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Replace the outputs (..., width) of the layer by NaN."""
        self.width = output.shape[-1]
        return torch.full_like(output, torch.nan)

    @abstractmethod
    def judge(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Set the problem, given what attention takes: (batch, heads, tokens, size) each."""


class _KeyTrial(_Trial):
    def judge(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        width = key.shape[1] * key.shape[3]
        gives_values = bool(value.isnan().any())
        if not bool(key.isnan().all()) or width > self.width:
            self.problem = f"{self.layer} does not compute them"
        elif gives_values is not (self.width > width):
            self.problem = f"{self.layer} computes neither keys alone nor keys and values"
        else:
            self.problem = None


class _QueryTrial(_Trial):
    def judge(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not bool(query.isnan().all()):
            self.problem = f"{self.layer} does not compute them"
        elif self.width != query.shape[1] * query.shape[3] or bool(key.isnan().any()):
            self.problem = f"{self.layer} does not compute them alone"
        else:
            self.problem = None


class _TrialRoute(AttentionRoute):
    """A route that lets a trial judge what attention takes, and returns zeros as the output."""

    _own = (*AttentionRoute._own, "trial")
    trial: _Trial

    def __init__(self, config: Any, trial: _Trial) -> None:
        super().__init__(config, None)
        self.trial = trial

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Judge the layer of the trial."""
        self.trial.judge(query, key, value)
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _has_nan(output: Any) -> bool:
    """Whether the first output of a model has NaN."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    return bool(first.isnan().any())
