"""Configurations of checkpoints that name another tool's method."""

from __future__ import annotations

from typing import Any

from quark.torch.export.formats.base import format_class
from quark.torch.quantization.config.config import Config


class QuantConfigParser:
    """Reads configurations in the style of other tools."""

    @staticmethod
    def from_custom_config(
        custom_config: dict[str, Any],
        is_bias_quantized: bool = False,
        is_kv_cache: bool = False,
        kv_layers_name: list[str] | None = None,
    ) -> Config:
        """Return the configuration that a custom section stands for.

        Raises:
            ValueError: The method, or something the section says, is not read by this version.
        """
        method = str(custom_config.get("quant_method"))
        return format_class(method).parse_section(custom_config)
