"""Write the stub of the helper classes, which type checkers and editors read.

The classes are made when they are imported, one for each row of ``config/spec_table.py``. After a
row was added or changed, run

    python scripts/spec_stub.py
"""

import inspect
from dataclasses import MISSING, fields
from pathlib import Path

from quark.torch.quantization.config import spec_classes

STUB = Path(spec_classes.__file__).with_suffix(".pyi")
HEAD = '''"""The documented helper classes. ``scripts/spec_stub.py`` writes this file."""

from dataclasses import dataclass

from quark.torch.quantization.config.spec_bases import DataTypeSpec as DataTypeSpec
from quark.torch.quantization.config.spec_bases import ProgressiveSpec as ProgressiveSpec
from quark.torch.quantization.config.spec_bases import ScaleQuantSpec as ScaleQuantSpec
from quark.torch.quantization.config.spec_bases import TwoStageSpec as TwoStageSpec
from quark.torch.quantization.config.type import Dtype, RoundType, ScaleType, ZeroPointType

SPEC_CLASSES: dict[str, type[DataTypeSpec]]
'''


def stub() -> str:
    """Return the text of the stub."""
    return HEAD + "".join(class_text(cls) for cls in spec_classes.SPEC_CLASSES.values())


def class_text(cls: type) -> str:
    """Return the declaration of one helper class."""
    lines = [
        f"    {f.name}: {f.type}" + ("" if f.default is MISSING else f" = {literal(f.default)}")
        for f in fields(cls)
    ]
    text = "\n".join([f'    """{inspect.getdoc(cls)}"""', *([""] if lines else []), *lines])
    return f"\n@dataclass\nclass {cls.__name__}(DataTypeSpec):\n{text}\n"


def literal(value: object) -> str:
    """Return a default as source text, strings in double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8", newline="\n")
    print(f"Written to {STUB}")
