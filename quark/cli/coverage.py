"""Scripts of the letters in the texts of a run: Latin, Han, Cyrillic and so on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quark.torch.pipeline.statistics import Statistics

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Coverage:
    """Shares of scripts among the letters of texts; empty where a text is not known.

    Attributes:
        calibration: Script to share, of the calibration text.
        evaluation: The same of the evaluation text.
    """

    calibration: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)

    def rows(self) -> dict[str, str]:
        """Return the shares in words, by title."""
        from quark.torch.evaluation.scripts import describe_scripts

        texts = {"letters calibrated": self.calibration, "letters evaluated": self.evaluation}
        return {title: describe_scripts(shares) for title, shares in texts.items() if shares}

    def notes(self) -> dict[str, str]:
        """Return the notes of a checkpoint about its calibration text."""
        from quark.torch.evaluation.scripts import write_shares

        return {"calibration_scripts": write_shares(self.calibration)} if self.calibration else {}

    def warn(self) -> None:
        """Warn if the evaluation text has scripts that the calibration text lacks."""
        from quark.torch.evaluation.scripts import describe_uncovered

        if said := describe_uncovered(self.calibration, self.evaluation):
            logger.warning("%s", said)


def scripts_of(tokenizer: Any | None, batches: Iterable[Any] | None) -> dict[str, float]:
    """Return the share of each script among the letters of token windows; see ``letters_of``."""
    from quark.torch.evaluation.scripts import shares_of

    return shares_of(letters_of(tokenizer, batches))


def letters_of(tokenizer: Any | None, batches: Iterable[Any] | None) -> dict[str, int]:
    """Return the number of letters of each script in token windows.

    Args:
        tokenizer: Tokenizer of the model, or None, which gives no numbers.
        batches: Tensors of token ids, (windows, length), or mappings with ``input_ids``; None for
            no text.
    """
    from quark.torch.evaluation.scripts import count_letters

    if tokenizer is None or batches is None:
        return {}
    rows = (row.tolist() for ids in map(_token_ids, batches) if ids is not None for row in ids)
    return count_letters(_decoded(tokenizer, rows))


def _decoded(tokenizer: Any, rows: Iterable[list[int]]) -> Iterator[str]:
    return (tokenizer.decode(row, skip_special_tokens=True) for row in rows)


def _token_ids(batch: Any) -> torch.Tensor | None:
    """Return the token ids of a batch, (windows, length); None for media alone."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    return ids if getattr(ids, "ndim", 0) == 2 else None


def measure_coverage(
    tokenizer: Any,
    calibration: list[Any] | None,
    statistics: Statistics | None,
    windows: list[torch.Tensor] | None,
) -> Coverage:
    """Return the scripts of the texts of a run, and warn if calibration lacks some.

    Args:
        tokenizer: Tokenizer of the model.
        calibration: Calibration data, None without.
        statistics: Statistics that take its place, or None.
        windows: Token identifiers of the evaluation, None without.
    """
    from quark.torch.evaluation.scripts import shares_of

    known = {} if statistics is None else shares_of(statistics.letters)
    coverage = Coverage(known or scripts_of(tokenizer, calibration), scripts_of(tokenizer, windows))
    coverage.warn()
    return coverage
