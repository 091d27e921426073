"""Names of experts in checkpoints of tools that do not use the names of the architecture.

Transformers stacks the matrices of experts, and the names of the stacks tell what they hold. Tools
that split them, such as gptqmodel, name the layers after that. Example for Mixtral::

    stack of Transformers    names of the architecture    names after the stack
    experts.gate_up_proj     experts.3.w1                 experts.3.gate_proj
                             experts.3.w3                 experts.3.up_proj
    experts.down_proj        experts.3.w2                 experts.3.down_proj
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.transformers_names import saved_names
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import first_match, literal, matches
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.operators import is_operator_module


def rename_experts(reader: Any, model: nn.Module) -> Any:
    """Return a reader in which experts have the names of a model; the reader itself if they have.

    Args:
        reader: Tensors of a checkpoint, with the names of the model but for experts.
        model: The float model, its experts split.
    """
    names = _names_after_stacks(model)
    renamed: dict[str, str] = {}  # stored name -> name of the model
    for key in reader.entries if names else ():
        layer, _, part = key.rpartition(".")
        if layer in names and f"{names[layer]}.{part}" not in reader.entries:
            renamed[key] = f"{names[layer]}.{part}"
    return _Reader(reader, renamed) if renamed else reader


def with_stored_names(config: Config, model: nn.Module) -> Config:
    """Return a configuration that selects each layer of a model by its other names too.

    These are the names under which the architecture is saved, and those of ``rename_experts``.

    Args:
        config: The configuration of a checkpoint.
        model: The float model, its experts split.
    """
    names = [name for name, module in model.named_modules() if is_operator_module(module)]
    after_stacks = {name: other for other, name in _names_after_stacks(model).items()}
    others = {name: {after_stacks.get(name, name)} for name in names}
    for given in ({name: name for name in names}, after_stacks):
        for name, saved in zip(given, saved_names(model, given.values()), strict=True):
            others[name].add(saved)
    layers: dict[str, QuantizationConfig] = {}
    exclude: list[str] = []
    for name, aliases in others.items():
        known = aliases | {name}
        if len(known) == 1:
            continue
        if any(matches(alias, config.exclude) for alias in known):
            exclude += [] if matches(name, config.exclude) else [literal(name)]
            continue
        patterns = config.layer_quant_config.items()
        layer = next((x for p, x in patterns if any(fnmatchcase(n, p) for n in known)), None)
        if layer is not None and layer is not first_match(name, config.layer_quant_config):
            layers[literal(name)] = layer
    return replace(
        config,
        exclude=[*config.exclude, *exclude],
        layer_quant_config={**layers, **config.layer_quant_config},
    )


def _names_after_stacks(model: nn.Module) -> dict[str, str]:
    """Return names of split experts after their stacks -> their names in the model."""
    names: dict[str, str] = {}
    for path, module in model.named_modules():
        if not isinstance(module, LinearExperts):
            continue
        for stack, layout in module.stacks.items():
            *roles, kind = stack.split("_")  # gate_up_proj: gate_proj, up_proj
            if len(roles) != len(layout.parts):
                continue
            for role, part in zip(roles, layout.parts, strict=True):
                for expert in range(module.num_experts):
                    names[f"{path}.{expert}.{role}_{kind}"] = f"{path}.{expert}.{part}"
    return {other: name for other, name in names.items() if other != name}


class _Reader:
    """Tensors of another reader, some of them under other names."""

    def __init__(self, reader: Any, renamed: Mapping[str, str]) -> None:
        self._reader, self._renamed = reader, renamed
        self._stored = {name: key for key, name in renamed.items()}
        self.metadata: dict[str, str] = getattr(reader, "metadata", {})
        self.entries = {renamed.get(key, key): entry for key, entry in reader.entries.items()}

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        tensor: torch.Tensor = self._reader.tensor(self._stored.get(key, key))
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self._reader.tensors():
            yield self._renamed.get(key, key), tensor
