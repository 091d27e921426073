"""Scripts of the letters in the texts of a run (Latin, Han, Cyrillic and so on), and languages."""

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
        calibration_languages: Language to share, of the calibration text; see ``languages_of``.
        evaluation_languages: The same of the evaluation text.
    """

    calibration: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    calibration_languages: dict[str, float] = field(default_factory=dict)
    evaluation_languages: dict[str, float] = field(default_factory=dict)

    def rows(self) -> dict[str, str]:
        """Return the shares in words, by title."""
        from quark.torch.evaluation.scripts import describe_scripts

        texts = {
            "letters calibrated": self.calibration,
            "languages calibrated": self.calibration_languages,
            "letters evaluated": self.evaluation,
            "languages evaluated": self.evaluation_languages,
        }
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

    return count_letters(_decoded(tokenizer, batches))


def languages_of(tokenizer: Any | None, batches: Iterable[Any] | None) -> dict[str, float]:
    """Return the share of each language in token windows; empty where py3langid is not installed.

    Args:
        tokenizer: As in ``letters_of``.
        batches: As in ``letters_of``.
    """
    from quark.torch.evaluation.languages import count_languages
    from quark.torch.evaluation.scripts import shares_of

    return shares_of(count_languages(_decoded(tokenizer, batches)))


def _decoded(tokenizer: Any | None, batches: Iterable[Any] | None) -> Iterator[str]:
    """Iterate over the texts of token windows."""
    if tokenizer is None:
        return
    for ids in map(_token_ids, batches or ()):
        for row in () if ids is None else ids:
            yield tokenizer.decode(row.tolist(), skip_special_tokens=True)


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
    """Return scripts and languages of the texts of a run, and warn if calibration lacks scripts.

    Args:
        tokenizer: Tokenizer of the model.
        calibration: Calibration data, None without.
        statistics: Statistics that take its place, or None.
        windows: Token identifiers of the evaluation, None without.
    """
    from quark.torch.evaluation.scripts import shares_of

    known = {} if statistics is None else shares_of(statistics.letters)
    coverage = Coverage(
        known or scripts_of(tokenizer, calibration),
        scripts_of(tokenizer, windows),
        {} if known else languages_of(tokenizer, calibration),
        languages_of(tokenizer, windows),
    )
    coverage.warn()
    return coverage
