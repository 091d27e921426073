"""Options of algorithms in messages, as the command line takes them: JSON in a file."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

_JSON = {"True": "true", "False": "false", "None": "null"}
_SETTING = re.compile(r"\b(\w+)=(True|False|None)\b")


def in_json(message: str, recipe: str | None = None) -> str:
    """Return a message of an algorithm with its options in JSON, and how to give them.

    Args:
        message: The message. That of an algorithm begins with its name: ``rotation: Set r1=False.``
        recipe: Recipe that sets the algorithms; it takes no file.
    """
    from quark.torch.quantization.config.algo import ALGO_CONFIGS
    from quark.torch.quantization.config.recipes import RECIPES

    name = message.partition(":")[0]
    if name not in ALGO_CONFIGS:
        return message
    options: Any = ALGO_CONFIGS[name]
    known = {field.name for field in fields(options)}

    def rewrite(match: re.Match[str]) -> str:
        option, value = match.groups()
        return f'"{option}": {_JSON[value]}' if option in known else match[0]

    rewritten = _SETTING.sub(rewrite, message)
    if rewritten == message:
        return message
    file = f"--quant_algo_config_file {name} FILE"
    if recipe is not None:
        scheme, algorithms = RECIPES[recipe]
        applied = ",".join(algorithm["name"] for algorithm in algorithms)
        return (
            f"{rewritten.rstrip('.')}. The recipe sets these options. In place of --recipe, give "
            f"--quant_scheme {scheme} --quant_algo {applied} {file}, with the options of {name} as "
            "JSON in FILE."
        )
    return f"{rewritten.rstrip('.')}. The options of {name} are in a JSON file: {file}."
