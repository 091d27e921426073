"""The finish after quantization: what it takes, the original that it needs, and its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quark.cli.console import wrong
from quark.cli.process_group import rank
from quark.cli.quantize.loading import load
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.distillation import Distillation, DistillationOptions
    from quark.torch.pipeline.journal import Journal
    from quark.torch.pipeline.run_steps import Finish as Shape
    from quark.torch.quantization.config.layer import QuantizationConfig


class Finish:
    """The finish of a run.

    Args:
        request: The flags.
        model: The float model, before it is quantized.
        batches: All calibration data, of which the finish keeps a part back.
        device: Where the original is loaded once more if the model is read in parts.

    Attributes:
        seen: The data that algorithms may see. What they have seen judges no finish.
    """

    def __init__(self, request: Request, model: nn.Module, batches: list[Any], device: str) -> None:
        from quark.torch.distillation import copy_of, split_kept_back
        from quark.torch.graph.residency import residency_of

        self._request, self._batches, self._device = request, batches, device
        self._options = read_options(request)
        copies = residency_of(model) is None and rank() == 0  # which trains alone
        self._copy = copy_of(model) if copies else None
        self.seen, _ = split_kept_back(batches, self._options)

    def run(self, model: nn.Module, journal: Journal | None) -> Distillation:
        """Train a quantized model in place, and return what came of it."""
        from quark.torch.distillation import distill
        from quark.torch.graph.residency import release

        release(model)
        original, source = self._copy, self._request.model_dir
        if original is None:
            original = load(self._request, source, self._device, in_float=True)
        return distill(model, original, self._batches, self._options, journal)


def plan_finish(
    request: Request, model: nn.Module, layers: Mapping[str, QuantizationConfig]
) -> Shape | None:
    """Return what the finish of a run takes; None without one."""
    from quark.torch.distillation import plan_finish as plan
    from quark.torch.trained_parameters import count_trained

    if request.finish is None:
        return None
    count = count_trained(model, layers)
    return plan(request.num_calib_data, count, read_options(request))


def read_options(request: Request) -> DistillationOptions:
    """Return the options of the finish: those of ``--finish_config_file``, and the defaults.

    Raises:
        typer.BadParameter: The file is not there, is no JSON, or has a wrong option.
    """
    from quark.torch.distillation import DistillationOptions

    file, known = request.finish_config_file, [f.name for f in fields(DistillationOptions)]
    if file is None:
        return DistillationOptions()
    try:
        given = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise wrong("--finish_config_file", f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - {*known})):
        what = type(given).__name__ if not isinstance(given, dict) else ", ".join(unknown)
        raise wrong(
            "--finish_config_file",
            f"{file} holds {what}. Give an object with some of {', '.join(known)}.",
        )
    try:
        return DistillationOptions(**given)
    except (TypeError, ValueError) as error:
        raise wrong("--finish_config_file", f"{file}: {error}") from None
