"""Checkpoints that diffusers loads itself, after ``register_with_diffusers``.

diffusers casts scales to the type of the weights, and leaves missing tensors without values. So it
reads no tensor of a quantized component: the strict reader of this package fills the component.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from quark.torch.export.api import ModelImporter
from quark.torch.export.checkpoint.reader import cast_float_parameters

_WITHOUT_VALUES = frozenset({"disk", "meta"})  # devices whose tensors are elsewhere


class _Method(StrEnum):
    """The method as diffusers expects it: an enumeration of names."""

    QUARK = "quark"


class _Section:
    """The section ``quantization_config`` of a component; its checkpoint is read later."""

    quant_method = _Method.QUARK

    def __init__(self, section: dict[str, Any]) -> None:
        self._section = section

    @classmethod
    def from_dict(cls, section: dict[str, Any]) -> _Section:
        """Return the section that ``config.json`` has."""
        return cls(section)

    def to_dict(self) -> dict[str, Any]:
        """Return the section for ``config.json``."""
        return dict(self._section)


def import_diffusers() -> Any:
    """Return the package diffusers.

    Raises:
        ImportError: The package is missing.
    """
    try:
        return import_module("diffusers")
    except ImportError as error:
        raise ImportError("pipelines need the package diffusers: pip install diffusers") from error


def register_with_diffusers() -> None:
    """Let ``from_pretrained`` of diffusers load components that this package quantized.

    Afterwards ``DiffusionPipeline.from_pretrained(directory)`` and ``from_pretrained`` of a model
    load what ``export_pipeline`` wrote, in this process, with the same checks as ``load_pipeline``.
    This may be called again.

    Raises:
        ImportError: The package diffusers is missing, or too old.
        ValueError: diffusers has a method of the same name already.
    """
    import_diffusers()
    auto = import_module("diffusers.quantizers.auto")
    base: Any = import_module("diffusers.quantizers.base").DiffusersQuantizer
    if not hasattr(base, "maybe_update_loaded_keys"):
        raise ImportError("this diffusers names no files to quantizers: install a newer version.")
    name = _Method.QUARK.value
    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    if configs.setdefault(name, _Section) is not _Section:
        raise ValueError(f"diffusers has a method {name!r} already, which is not replaced.")
    quantizers.setdefault(name, _quantizer_class(base))


def _quantizer_class(base: Any) -> type:
    """Return the class that diffusers calls while it loads a component.

    Args:
        base: The class of diffusers that quantizers derive from.
    """

    class QuarkQuantizer(base):  # type: ignore[misc]
        requires_calibration = True  # from_pretrained of a float model cannot quantize it
        use_keep_in_fp32_modules = True
        is_serializable = False  # export_pipeline writes it
        is_trainable = False
        supports_parallel_loading = False

        def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
            if isinstance(device_map, dict) and _WITHOUT_VALUES & set(
                map(str, device_map.values())
            ):
                raise ValueError(
                    "device_map puts a part of a quantized component on the disk or the meta "
                    "device: give only devices that compute."
                )

        def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
            self.dtype = torch_dtype
            return torch_dtype

        def maybe_update_loaded_keys(self, _: Any, checkpoint_files: Sequence[str]) -> list[str]:
            self.directory = Path(checkpoint_files[0]).parent
            return []

        def maybe_update_state_dict(self, _: Any) -> dict[str, Any]:
            return {}

        def update_missing_keys(self, *_: Any, **__: Any) -> list[str]:
            return []

        def _process_model_before_weight_loading(
            self, model: Any, keep_in_fp32_modules: Sequence[str] = (), **_: Any
        ) -> None:
            ModelImporter(self.directory, "safetensors").import_model_info(model)
            if self.dtype is not None:
                cast_float_parameters(model, self.dtype, keep_in_fp32_modules)

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            return model

    return QuarkQuantizer
