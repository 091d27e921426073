"""The text of a report: where it comes from, how much it is, and its scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from quark.torch.evaluation.scripts import read_shares
from quark.torch.export.checkpoint.config_json import notes_of


@dataclass(frozen=True)
class Text:
    """Text that the model was run on.

    Attributes:
        source: Its name.
        windows: Number of windows.
        tokens: Tokens of a window.
        scripts: Script to its share of the letters; empty if it is not known.
        calibrated: The same of the text that the checkpoint was calibrated on.
    """

    source: str
    windows: int
    tokens: int
    scripts: Mapping[str, float] = field(default_factory=dict)
    calibrated: Mapping[str, float] = field(default_factory=dict)


def describe_text(source: str, windows: torch.Tensor, model: nn.Module) -> Text:
    """Return the text of a report.

    Args:
        source: Its name.
        windows: Its token identifiers, (windows, length).
        model: Model of the checkpoint, whose configuration has the scripts of its calibration.
    """
    notes = notes_of(getattr(model, "config", None))
    calibrated = read_shares(notes.get("calibration_scripts", ""))
    return Text(source, len(windows), windows.shape[1], calibrated=calibrated)
