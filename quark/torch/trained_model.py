"""A quantized model that runs with trained parameters in the place of its own.

A model in memory runs as a whole. Of one that is read in parts, each part is brought in, runs with
its trained values and keeps no graph: it is brought in and runs again when gradients pass it. Both
give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from quark.torch.graph.checkpointing import checkpointed
from quark.torch.graph.float_products import float_products
from quark.torch.graph.replay import replace_forwards
from quark.torch.graph.residency import WHOLE, Part, residency_of, resident
from quark.torch.pipeline.batches import run_batch
from quark.torch.trained_parameters import TrainedParameters


class TrainedModel:
    """A quantized model that runs with trained parameters in the place of its own.

    Args:
        model: The model. It is not changed.
        trained: Its trained parameters.
    """

    def __init__(self, model: nn.Module, trained: TrainedParameters) -> None:
        self._model, self._trained = model, trained

    def run(self, batch: Any) -> Any:
        """Return the output for a batch, with its graph where gradients are enabled."""
        residency = residency_of(self._model)
        if residency is None:
            return run_batch(_Bound(self._model, self._trained.values(WHOLE)), batch)
        # Modules around lists hold neither layers nor norms themselves.
        parts = [part for part in residency.parts() if part.is_whole]
        forwards = {part.name: self._forward(part) for part in parts}
        with replace_forwards(self._model, forwards):
            return run_batch(self._model, batch)

    def _forward(self, part: Part) -> Callable[..., Any]:
        """Return a forward of a part that uses trained values."""
        module = self._model.get_submodule(part.name)
        plain = _Unhooked(module, module.forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            # Again when gradients pass the part, outside of the call of the model.
            with resident(self._model, part.handle), float_products():
                values = {f"module.{n}": x for n, x in self._trained.values(part).items()}
                return functional_call(plain, values, args, kwargs)

        return checkpointed(run)


class _Bound(nn.Module):
    """A model some of whose tensors are replaced."""

    def __init__(self, model: nn.Module, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model, self._values = model, values

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the replaced tensors."""
        return functional_call(self.model, self._values, args, kwargs)


class _Unhooked(nn.Module):
    """A module that is called by a function, past its hooks, which its caller has run."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._call(*args, **kwargs)
