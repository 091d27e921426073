"""The documented helper classes, made of the rows of ``spec_table``.

Type checkers and editors read ``spec_classes.pyi``, which ``scripts/spec_stub.py`` writes.
"""

from __future__ import annotations

from dataclasses import field, make_dataclass
from typing import Any

from quark.torch.quantization.config.spec_bases import (
    DataTypeSpec,
    ProgressiveSpec,
    ScaleQuantSpec,
    TwoStageSpec,
)
from quark.torch.quantization.config.spec_table import REQUIRED, SPECS, TYPES
from quark.torch.quantization.config.type import (  # noqa: F401 (annotations name them)
    Dtype,
    RoundType,
    ScaleType,
    ZeroPointType,
)

__all__ = [
    *SPECS,
    "SPEC_CLASSES",
    "DataTypeSpec",
    "ProgressiveSpec",
    "ScaleQuantSpec",
    "TwoStageSpec",
]


def _make(name: str, base: dict[str, Any], arguments: dict[str, Any]) -> type[DataTypeSpec]:
    target = " ".join(str(base[key]) for key in ("dtype", "qscheme") if key in base)
    required = [(f, TYPES[f]) for f, default in arguments.items() if default is REQUIRED]
    optional = [
        (f, TYPES[f], field(default=default))
        for f, default in arguments.items()
        if default is not REQUIRED
    ]
    namespace = {"__doc__": f"Quantization to {target}.", "_base": base, "__module__": __name__}
    return make_dataclass(name, [*required, *optional], bases=(DataTypeSpec,), namespace=namespace)


SPEC_CLASSES: dict[str, type[DataTypeSpec]] = {n: _make(n, *row) for n, row in SPECS.items()}
globals().update(SPEC_CLASSES)
