"""Flags of the documented script that have no effect, or are not supported.

They are accepted, so that no command line fails on an unknown flag. A flag without effect warns.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from quark.cli.console import wrong

logger = logging.getLogger(__name__)

_ONE_DEVICE = (
    "--device names the devices, such as cuda:0,cuda:1 or all. A model that is too large for one "
    "is brought to it block by block"
)
_WHOLE_MODEL = "the whole model is held in memory; the checkpoint is the same"
_KERNELS = (
    "models are evaluated exactly here. Use quark evaluate --runtime fast, or compiled for formats "
    "without a kernel, or serve the checkpoint."
)

# Flag -> why it has no effect.
NOTED = {
    "multi_gpu": _ONE_DEVICE,
    "multi_device": _ONE_DEVICE,
    "torch_compile": "nothing is compiled; results do not depend on it",
    "import_file_format": "the format is recognized from the files",
    "use_ppl_eval_model": "perplexity is always measured",
    "gpu_resident_blocks": _WHOLE_MODEL,
}
# Flag -> why it is not supported, and what to do.
REFUSED = {
    "moe_experts_second_step_config": "name the experts instead: --layer_quant_scheme "
    "'*experts*' int4_fp8.",
    "enable_native_inference": _KERNELS,
    "native_linear_mode": _KERNELS,
    "use_mlperf_rouge": "its data is not public. Give --tasks, or your own files with "
    "--include_path.",
    "use_tp": "evaluation runs on one device. Leave it out.",
}
# Flag -> value that means the default.
_DEFAULTS = {"native_linear_mode": "auto"}


def _hidden() -> Any:
    return typer.Option(hidden=True)


@dataclass(frozen=True, kw_only=True)
class CompatibilityFlags:
    """One hidden flag for each of ``NOTED`` and ``REFUSED``."""

    multi_gpu: Annotated[list[str] | None, _hidden()] = None
    multi_device: Annotated[bool, _hidden()] = False
    torch_compile: Annotated[bool, _hidden()] = False
    import_file_format: Annotated[str | None, _hidden()] = None
    use_ppl_eval_model: Annotated[bool, _hidden()] = False
    gpu_resident_blocks: Annotated[str | None, _hidden()] = None
    moe_experts_second_step_config: Annotated[str | None, _hidden()] = None
    enable_native_inference: Annotated[bool, _hidden()] = False
    native_linear_mode: Annotated[str | None, _hidden()] = None
    use_mlperf_rouge: Annotated[bool, _hidden()] = False
    use_tp: Annotated[bool, _hidden()] = False
    given: frozenset[str] = frozenset()


def check_compatibility(flags: CompatibilityFlags) -> None:
    """Warn about flags without effect.

    Raises:
        typer.BadParameter: A flag is not supported.
    """
    given = flags.given & {*NOTED, *REFUSED}
    changed = sorted(name for name in given if getattr(flags, name) != _DEFAULTS.get(name))
    for name in changed:
        if name in REFUSED:
            raise wrong(f"--{name}", REFUSED[name])
    for name in changed:
        logger.warning("--%s: %s.", name, NOTED[name])
