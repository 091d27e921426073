"""How far a finish is, in memory and in a journal, from which it goes on after a kill."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quark.torch.pipeline.journal import Journal
from quark.torch.trained_parameters import TrainedParameters

State = dict[str, dict[str, torch.Tensor]]


class Progress(NamedTuple):
    """How far training is.

    Attributes:
        step: Steps that ran.
        best_step: The step whose parameters are the best; 0 if none was better than none.
        first: Divergence of each sequence that is kept back before any step, (sequences,).
        best: Likewise, after the best step.
        state: The parameters after the best step.
    """

    step: int
    best_step: int
    first: torch.Tensor
    best: torch.Tensor
    state: dict[str, torch.Tensor]

    def after(self, step: int, figures: torch.Tensor, trained: TrainedParameters) -> Progress:
        """Return the progress after a step that was measured, with these figures."""
        if figures.mean() < self.best.mean():
            return Progress(step, step, self.first, figures, trained.state())
        return self._replace(step=step)


class FinishFiles:
    """The progress of a finish on the disk, in a journal.

    Args:
        journal: The journal.
        request: Options and data of the finish, as plain JSON types.
        steps: The steps that are measured.

    Raises:
        ValueError: The journal holds a finish with other options or data.
    """

    def __init__(self, journal: Journal, request: dict[str, Any], steps: list[int]) -> None:
        self._request = request
        self._files = journal.begin_steps([str(step) for step in steps])
        for entry in self._files.entries.values():
            if entry.notes["request"] != self._request:
                raise ValueError(
                    f"{journal.directory} holds a finish with other options or data: "
                    f"{entry.notes['request']}. Ask for the same to go on, or throw it away: "
                    "--restart, or Journal(directory, restart=True)."
                )

    def read(self) -> tuple[Progress, State] | None:
        """Return the progress of the last file, and the state of training then; None without."""
        if not self._files.entries:
            return None
        step = max(self._files.entries, key=int)
        entry = self._files.entries[step]
        parts: State = {}
        for key, value in entry.tensors().items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = value
        figures, best = parts.pop("figures"), parts.pop("best")
        numbers = int(step), entry.notes["best step"]
        return Progress(*numbers, figures["first"], figures["best"], best), parts

    def write(self, progress: Progress, state: State) -> None:
        """Write the progress and the state of training, in place of what was written before."""
        earlier = list(self._files.entries)
        parts = {
            **state,
            "best": progress.state,
            "figures": {"first": progress.first, "best": progress.best},
        }
        tensors = {f"{part}/{n}": x for part, own in parts.items() for n, x in own.items()}
        notes = {"request": self._request, "best step": progress.best_step}
        self._files.write(str(progress.step), tensors, notes)
        for step in earlier:
            self._files.remove(step)
