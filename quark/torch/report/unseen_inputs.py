"""Inputs of layers that calibration hardly saw.

GPTQ and its relatives choose the rounding errors of a weight so that they cancel on the inputs of
the calibration text. On inputs in other directions they do not cancel. Text of another language or
another kind may have such inputs.

Let H be the mean of x xᵀ over the inputs of a layer in the calibration text, and λ one hundredth of
its mean diagonal: the damping of GPTQ. The share of the energy of an input x in directions that
calibration hardly saw is::

    λ xᵀ (H + λ)⁻¹ x / xᵀ x

For an eigenvector of H with the eigenvalue h it is λ / (h + λ): 1 if calibration never saw it, and
almost 0 if it often did. Example: H = diag(2, 0) has the mean diagonal 1, so λ = 0.01. The input
(1, 0) has the share 0.01 / 2.01 = 0.5 %, (0, 1) has 100 %, and (1, 1) has the mean of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.statistics import Statistics
from quark.torch.progress import show_progress

SAMPLE = 512  # tokens whose inputs are compared
DAMPING = 0.01
CONTEXT = 8  # tokens that are shown with a token, up to itself
SHOWN = 12  # tokens that are listed

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class UnseenToken:
    """A token whose inputs calibration hardly saw.

    Attributes:
        window: Number of the window of the text.
        position: Number of the token in the window.
        text: The token, after the tokens before it.
        ratio: Mean over layers of its share, in units of the share of calibration's own tokens.
    """

    window: int
    position: int
    text: str
    ratio: float


@dataclass(frozen=True)
class UnseenInputs:
    """Shares of the energy of inputs in directions that calibration hardly saw.

    Attributes:
        text: Share of the text that the model was run on, median over layers.
        calibration: Share of the calibration text, likewise.
        layers: First of the layers that read a tensor -> shares of the text and of calibration.
        tokens: The tokens with the largest ratios, the largest first.
    """

    text: float
    calibration: float
    layers: dict[str, tuple[float, float]]
    tokens: list[UnseenToken]


class CalibrationText(NamedTuple):
    """A calibration text.

    Attributes:
        statistics: Statistics of the float model in it.
        decode: Returns the text of token identifiers; None to list the identifiers themselves.
    """

    statistics: Statistics
    decode: Decode | None = None


class TokenInputs:
    """Inputs of linear layers at some tokens of a text, the same tokens for all layers.

    Args:
        names: Names of the layers.
        windows: Token identifiers, (windows, length).
        store: Store for the inputs.
    """

    def __init__(self, names: Sequence[str], windows: torch.Tensor, store: ActivationStore) -> None:
        self.windows = windows
        self.tokens = torch.arange(
            0, windows.numel(), max(1, -(-windows.numel() // SAMPLE)), device="cpu"
        )
        self._names = names
        self._store = store
        self._counts = dict.fromkeys(names, 0)
        self._places: dict[str, list[int]] = {name: [] for name in names}

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Record inputs while the windows run through a model, in order, inside the context."""
        modules = dict(model.named_modules())
        hooks = [
            modules[name].register_forward_pre_hook(partial(self._add, name))
            for name in self._names
            if name in modules
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, name: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].detach().flatten(0, -2)
        first = self._counts[name]
        self._counts[name] += len(x)
        rows = self.tokens[(self.tokens >= first) & (self.tokens < self._counts[name])] - first
        if len(rows):
            place = len(self._store)
            self._places[name].append(place)
            self._store[place] = x[rows.to(x.device)]

    @property
    def layers(self) -> list[str]:
        """Names of the layers that read every token once; an expert does not."""
        return [name for name in self._names if self._counts[name] == self.windows.numel()]

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the inputs of a layer, (tokens, inputs) float32."""
        return torch.cat([self._store[place] for place in self._places[name]]).float()


def unseen_energy(gram: torch.Tensor, *samples: torch.Tensor) -> list[torch.Tensor]:
    """Return the energy of inputs in directions that calibration hardly saw, beside all of it.

    Args:
        gram: Mean of x xᵀ over calibration, (inputs, inputs) float32. It is overwritten.
        *samples: Inputs, (tokens, inputs) float32 each.

    Returns:
        (2, tokens) float64 for each sample: both energies of each token.
    """
    damping = DAMPING * gram.diagonal().mean()
    gram.diagonal().add_(damping)
    factor = torch.linalg.cholesky(gram)
    energies = []
    for x in samples:
        y = torch.linalg.solve_triangular(factor, x.T, upper=False)
        energies.append(torch.stack([damping * y.square().sum(0), x.square().sum(1)]).double())
    return energies


def find_unseen_inputs(inputs: TokenInputs, calibration: CalibrationText) -> UnseenInputs | None:
    """Compare inputs of layers with those in a calibration text.

    Args:
        inputs: Inputs of the float model in a text.
        calibration: The calibration text, with statistics of the same model.

    Returns:
        The shares; None if calibration reached no layer that reads every token.
    """
    statistics, decode = calibration
    layers: dict[str, tuple[float, float]] = {}
    ratios = torch.zeros(len(inputs.tokens), dtype=torch.float64, device="cpu")
    for name in show_progress(inputs.layers, "inputs"):
        gram, sample = statistics.inputs[name].mean(), statistics.sample(name)
        if gram is None or sample is None or not gram.any():
            continue
        ours, theirs = unseen_energy(gram, inputs[name], sample.float())
        shares = [float(part / whole) for part, whole in (ours.sum(1), theirs.sum(1))]
        layers[name] = shares[0], shares[1]
        ratios += ours[0] / ours[1].clamp(min=torch.finfo(torch.float64).tiny) / shares[1]
    if not layers:
        return None
    each = torch.tensor(list(layers.values()), dtype=torch.float32, device="cpu")
    text, usual = each.median(0).values.tolist()
    tokens = _list_tokens(inputs, ratios / len(layers), decode)
    return UnseenInputs(text, usual, layers, tokens)


def _list_tokens(
    inputs: TokenInputs, ratios: torch.Tensor, decode: Decode | None
) -> list[UnseenToken]:
    length = inputs.windows.shape[1]
    listed = []
    for index in ratios.argsort(descending=True, stable=True)[:SHOWN].tolist():
        window, position = divmod(int(inputs.tokens[index]), length)
        context = inputs.windows[window, max(0, position + 1 - CONTEXT) : position + 1].tolist()
        text = " ".join(map(str, context)) if decode is None else decode(context)
        listed.append(UnseenToken(window, position, text, float(ratios[index])))
    return listed


def describe_unseen_inputs(unseen: UnseenInputs) -> str:
    """Return a sentence on the text and the calibration text."""
    return (
        f"In the median layer, {unseen.text:.1%} of the energy of the inputs is in directions that "
        f"calibration hardly saw; in the calibration text itself it is {unseen.calibration:.1%}."
    )
