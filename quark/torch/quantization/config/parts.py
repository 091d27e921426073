"""Parts of a model that a scheme for its language model leaves in float, found by structure.

``Config.float_parts`` names kinds of parts. No name of a module or model is known here: a
multimodal model of Transformers has one configuration for each of its models, and each model
declares its modalities. ``part_kinds`` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from quark.torch.quantization.config.linear_classes import operator_class

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


class Part(NamedTuple):
    """A part of a model.

    Attributes:
        kind: One of ``PARTS``.
        name: Name of the module that holds all of it.
        title: What it is, such as ``vision tower``.
    """

    kind: str
    name: str
    title: str

    def holds(self, name: str) -> bool:
        """Whether a module belongs to the part, by its name."""
        return name == self.name or name.startswith(f"{self.name}.")


def find_parts(model: nn.Module) -> list[Part]:
    """Return the parts of a model that do not belong to its language model.

    Args:
        model: Any model; its tensors may be on the meta device. A model without towers and without
            experts has no parts.
    """
    modules = dict(model.named_modules())
    towers = _find_towers(model, modules)
    parts = [*towers, *_find_projectors(model, modules, towers), *_find_routers(modules)]
    return list(dict.fromkeys(parts))


def has_towers(model: nn.Module) -> bool:
    """Whether a model has models of images or audio beside its language model."""
    return bool(_find_towers(model, dict(model.named_modules())))


def output_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a model, or a model inside of it, has as its output head.

    These are the declared output embeddings. A model without any has the layers on top of its base
    model, such as the classifier of a ``ForSequenceClassification``, whether they are one layer or
    several in modules of their own.
    """
    heads = _output_embeddings(model)
    layers = [m for head in heads for m in head.modules() if next(m.children(), None) is None]
    if not heads:
        layers = [m for top in _find_tops(model) for m in top.modules() if _has_product(m)]
    return list(dict.fromkeys(layers))


def _find_tops(model: nn.Module) -> list[nn.Module]:
    """Return the modules on top of a base model, which come after it; those before it feed it."""
    base = getattr(model, "base_model", model)
    modules = list(model.children())
    if base is model or not any(module is base for module in modules):
        return []
    return modules[modules.index(base) + 1 :]


def _has_product(module: nn.Module) -> bool:
    """Whether a module has a matrix or a kernel, which norms lack."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() > 1


def _output_embeddings(model: nn.Module) -> list[nn.Module]:
    """Return the output embeddings that a model and the models inside of it declare."""
    # Types are asked first: a module takes long to say that it lacks an attribute.
    modules: Iterable[Any] = model.modules()
    declaring = (m for m in modules if hasattr(type(m), "get_output_embeddings"))
    declared = (m.get_output_embeddings() for m in declaring)
    return [head for head in declared if isinstance(head, nn.Module)]


def _find_towers(model: nn.Module, modules: dict[str, nn.Module]) -> list[Part]:
    """Return the outermost models of other modalities than text, with configurations of their own.

    An encoder-decoder reads its images or audio by its own encoder, which is not a tower. Models of
    two equal sides, such as CLIP, do not generate text and have no towers.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or config.is_encoder_decoder:
        return []
    if not (getattr(model, "can_generate", lambda: False)() or _output_embeddings(model)):
        return []
    language = config.get_text_config(decoder=True)
    own = {type(config), type(language)}
    towers: list[Part] = []
    for name, module in modules.items():
        senses = _modalities(module) - {"text"}
        # Models of images often inherit the modalities of the whole model, text among them.
        is_tower = bool(senses) and (language is not config or "text" not in _modalities(module))
        if not is_tower or any(tower.holds(name) for tower in towers):
            continue
        if not any(type(getattr(m, "config", None)) in own for m in module.modules()):
            towers.append(Part("tower", name, f"{_sense(senses, _modalities(model))} tower"))
    return towers


def _modalities(module: nn.Module) -> set[str]:
    """Return what a model reads; an ordinary module declares nothing."""
    declared = getattr(module, "input_modalities", ())
    return {declared} if isinstance(declared, str) else set(declared)


def _sense(senses: set[str], of_all: set[str]) -> str:
    senses = (senses & of_all) or (of_all - {"text"}) or senses
    return "vision" if senses & {"image", "video"} else min(senses)


def _find_projectors(
    model: nn.Module, modules: dict[str, nn.Module], towers: list[Part]
) -> list[Part]:
    """Return the modules with layers that are in no tower, not in the language model, no head.

    A module that holds a tower and is not itself a model belongs to the tower: its layers are
    projectors, even inside of the language model.
    """
    if not towers:
        return []
    config: Any = model.config
    language = type(config.get_text_config(decoder=True))
    models = {name for name, module in modules.items() if hasattr(module, "input_modalities")}
    holders = [tower.name.rpartition(".")[0] for tower in towers]
    holders = [name for name in holders if name not in models]
    heads = {id(layer) for layer in output_layers(model)}
    inner = [
        name
        for name, module in modules.items()
        if type(getattr(module, "config", None)) is language and name in models
    ]
    layers = {name for name, module in modules.items() if isinstance(module, _LAYERS)}
    outside = {
        name
        for name in layers
        if not any(tower.holds(name) for tower in towers)
        and id(modules[name]) not in heads
        and (_is_inside(name, holders) or not _is_inside(name, inner))
    }
    tops = dict.fromkeys(_outermost(name, outside, layers) for name in sorted(outside))
    return [Part("projector", name, "projector") for name in tops]


def _is_inside(name: str, parents: Iterable[str]) -> bool:
    return any(not parent or name.startswith(f"{parent}.") for parent in parents)


def _outermost(name: str, wanted: set[str], layers: set[str]) -> str:
    """Return the outermost module around a layer whose layers are all wanted.

    Example: ``connector`` for ``connector.linear``, if it has no layer that is not wanted.
    """
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        if all(layer in wanted for layer in layers if layer.startswith(f"{parent}.")):
            return parent
    return name


def _find_routers(modules: dict[str, nn.Module]) -> list[Part]:
    """Return the layers that weigh experts: one output for each expert, or for a shared expert.

    Experts are equal members of a list, or one parameter with an axis of experts. Their router is
    beside them: a matrix of as many rows.
    """
    routers: list[Part] = []
    for name, module in modules.items():
        count = _count_experts(module)
        parent, _, own = name.rpartition(".")
        if count < 2 or not own:
            continue
        beside = {"": modules[parent]} | {
            n: m
            for child, top in modules[parent].named_children()
            if child != own
            for n, m in top.named_modules(prefix=child)
        }
        if any(_rows(m) == count for m in beside.values()):
            routers += [
                Part("router", f"{parent}.{n}" if parent else n, "router of experts")
                for n, m in beside.items()
                if operator_class(type(m)) is nn.Linear and m.out_features in (1, count)
            ]
    return routers


def _count_experts(module: nn.Module) -> int:
    """Return the number of equal members of a list with layers, or of a stack; 0 for others."""
    stacks = [p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3]
    if stacks and not isinstance(module, _LAYERS):
        return stacks[0] if len(set(stacks)) == 1 else 0
    members = [child for name, child in module.named_children() if name.isdecimal()]
    first = tuple(_shapes(members[0])) if members else ()
    # It stops at the first member that differs: blocks of large models have many parameters.
    is_equal = bool(first) and all(tuple(_shapes(member)) == first for member in members[1:])
    return len(members) if is_equal else 0


def _shapes(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _rows(module: nn.Module) -> int:
    """Return the rows of the matrix of a module, 0 without one."""
    weight = module._parameters.get("weight")
    return weight.shape[0] if weight is not None and weight.dim() == 2 else 0
