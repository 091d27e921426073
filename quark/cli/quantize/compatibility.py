"""Flags of the documented script that change nothing here, or that cannot be followed.

They are known, so that no command line fails on a flag, and none is passed over in silence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from quark.cli.console import wrong

logger = logging.getLogger(__name__)

_ONE_DEVICE = "one device does the work. Where its memory is too small, give --device cpu"
_WHOLE_MODEL = "the whole model is held in memory, which gives the same checkpoint"
_AT_PROJECTIONS = "attention is computed in float; --kv_cache_dtype quantizes keys and values."
_KERNELS = "products are computed in float here. Serve the checkpoint with vLLM for its kernels."

# Flag -> what is said of it, while the work goes on.
NOTED = {
    "multi_gpu": _ONE_DEVICE,
    "multi_device": _ONE_DEVICE,
    "torch_compile": "nothing is compiled: files and figures do not depend on it",
    "import_file_format": "the format is told from the files",
    "use_ppl_eval_model": "perplexity is measured in any case",
    "file2file_quantization": _WHOLE_MODEL,
    "quant_flow": _WHOLE_MODEL,
    "gpu_resident_blocks": _WHOLE_MODEL,
}
# Flag -> why it cannot be followed, and what to do.
REFUSED = {
    "attention_dtype": _AT_PROJECTIONS,
    "fp8_attention_quant": _AT_PROJECTIONS,
    "moe_experts_second_step_config": "name the experts instead: --layer_quant_scheme "
    "'*experts*' int4_fp8.",
    "enable_native_inference": _KERNELS,
    "native_linear_mode": _KERNELS,
    "no_keep_prequantized_layers": "only float models are quantized. Give the float model.",
    "use_mlperf_rouge": "its data is not public. Give --tasks, or files of your own by "
    "--include_path.",
    "use_tp": "evaluation runs on one device. Leave it out.",
}
_HARMLESS = {"quant_flow": "standard", "native_linear_mode": "auto"}


def _hidden() -> Any:
    return typer.Option(hidden=True)


@dataclass(frozen=True, kw_only=True)
class CompatibilityFlags:
    """A field for each of these flags, so that its value is taken off the command line."""

    multi_gpu: Annotated[list[str] | None, _hidden()] = None
    multi_device: Annotated[bool, _hidden()] = False
    torch_compile: Annotated[bool, _hidden()] = False
    import_file_format: Annotated[str | None, _hidden()] = None
    use_ppl_eval_model: Annotated[bool, _hidden()] = False
    file2file_quantization: Annotated[bool, _hidden()] = False
    quant_flow: Annotated[str | None, _hidden()] = None
    gpu_resident_blocks: Annotated[str | None, _hidden()] = None
    attention_dtype: Annotated[str | None, _hidden()] = None
    fp8_attention_quant: Annotated[bool, _hidden()] = False
    moe_experts_second_step_config: Annotated[str | None, _hidden()] = None
    enable_native_inference: Annotated[bool, _hidden()] = False
    native_linear_mode: Annotated[str | None, _hidden()] = None
    no_keep_prequantized_layers: Annotated[bool, _hidden()] = False
    use_mlperf_rouge: Annotated[bool, _hidden()] = False
    use_tp: Annotated[bool, _hidden()] = False
    given: frozenset[str] = frozenset()


def check_compatibility(flags: CompatibilityFlags) -> None:
    """Say of the flags on the command line what becomes of them.

    Raises:
        typer.BadParameter: One cannot be followed.
    """
    known = flags.given & {*NOTED, *REFUSED}
    meant = sorted(name for name in known if getattr(flags, name) != _HARMLESS.get(name))
    for name in meant:
        if name in REFUSED:
            raise wrong(f"--{name}", REFUSED[name])
    for name in meant:
        logger.warning("--%s: %s.", name, NOTED[name])
