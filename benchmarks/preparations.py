"""Algorithms that prepare a model for rounding, by name, and options of algorithms as text."""

from __future__ import annotations

from typing import Any

from quark.torch.quantization.config.algo_lookup import algo_config_from_dict

NONE = "none"
AWQ: dict[str, Any] = {"name": "awq"}
SMOOTH: dict[str, Any] = {"name": "smooth", "alpha": 1}
R1R2: dict[str, Any] = {"name": "rotation", "r1": True, "r2": True}
R1R2R4: dict[str, Any] = {**R1R2, "r4": True}
HALF = SMOOTH | {"alpha": 0.5}
_ALL_INPUTS = {"online_rotation_layers": ["*"]}
BLOCKS: dict[str, Any] = {"name": "rotation", "r1": False, "rotation_size": 32}
BLOCKS |= {"online_config": _ALL_INPUTS}
PRESCALED = BLOCKS | {"online_config": _ALL_INPUTS | {"use_input_prescale": True}}
# Name -> what comes before the algorithm that rounds.
PREPARATIONS: dict[str, list[dict[str, Any]]] = {
    NONE: [],
    "awq": [AWQ],
    "smooth": [SMOOTH],
    "r1r2": [R1R2],
    "r1r2r4": [R1R2R4],
    "blocks": [BLOCKS],
    "prescaled": [PRESCALED],
    "half": [HALF],
    "halfawq": [HALF, AWQ],
    "auto": [{"name": "autosmoothquant"}],
    "smoothed": [HALF, BLOCKS],
    "smoothed124": [HALF, R1R2R4],
    "smoothed16": [HALF, BLOCKS | {"rotation_size": 16}],
}


def options_of(text: str) -> dict[str, Any]:
    """Return options: of ``gptq``, or of ``gptq:option``, which is on, or ``gptq:option=0.5``."""
    name, *given = text.split(":")
    options: dict[str, Any] = {"name": name}
    for option, _, value in (part.partition("=") for part in given):
        options[option] = float(value) if value else True
    return options


def preparation(text: str) -> list[dict[str, Any]]:
    """Return the steps of a preparation, such as ``smoothed`` or ``smoothed:alpha=0.7``.

    An option goes to every step that has it.
    """
    name, _, given = text.partition(":")
    options = options_of(f"{name}:{given}" if given else name)
    del options["name"]
    steps = []
    for step in PREPARATIONS[name]:
        known = algo_config_from_dict(step)
        steps.append(step | {key: value for key, value in options.items() if hasattr(known, key)})
    return steps
