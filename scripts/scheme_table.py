"""Write the table of ``quark schemes``, so that the command starts without torch.

After a scheme was added or changed, run

    python scripts/scheme_table.py
"""

import json
from typing import Any

from quark.cli.schemes import TABLE
from quark.torch.quantization.calibration import needs_data
from quark.torch.quantization.config.description import describe, describe_layer
from quark.torch.quantization.config.presets import (
    KV_CACHE_SCHEMES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)


def table() -> str:
    """Return the text of the table."""
    rows = {
        "quant_scheme": [layer_row(name) for name in sorted(scheme_names(), key=sort_key)],
        "kv_cache_dtype": [
            {"name": name, "kv_cache": describe(kv_cache_scheme(name))} for name in KV_CACHE_SCHEMES
        ],
    }
    return json.dumps(rows, indent=2) + "\n"


def layer_row(name: str) -> dict[str, Any]:
    """Return the row of a scheme of layers."""
    layer = scheme(name)
    words = describe_layer(layer)
    return {
        "name": name,
        "weight": words.weight,
        "input": words.input,
        "output": words.output,
        "needs_data": needs_data([layer]),
    }


def sort_key(name: str) -> tuple[bool, str, int]:
    """Sort key: names of earlier versions last, and ``int4_wo_32`` before ``int4_wo_128``."""
    prefix, _, size = name.rpartition("_")
    by_size = (prefix, int(size)) if size.isdigit() else (name, 0)
    return (name.startswith("w_"), *by_size)


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8", newline="\n")
    print(f"Written to {TABLE}")
