"""Resolution of a configuration against a model: general names become names of its modules.

A configuration is often written before there is a model. Two of its values stand for a role that
each architecture names differently, and are resolved when a model is quantized:

- ``lm_head`` in ``exclude``: the output head, such as ``embed_out`` of GPT-NeoX.
- ``FUSED_PROJECTIONS`` as ``shared_scale_groups``: all layers that share an input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import literal, matches

OUTPUT_HEAD = "lm_head"
# Projections of Llama that inference software fuses, as in the schemes of the documented API.
FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fused_projections() -> list[list[str]]:
    """Return a new list of ``FUSED_PROJECTIONS``, for ``Config.shared_scale_groups``."""
    return [list(group) for group in FUSED_PROJECTIONS]


def shares_inputs(config: Config) -> bool:
    """Whether all layers that share an input are to share scales, whatever their names."""
    return config.shared_scale_groups == fused_projections()


def output_head(model: nn.Module) -> list[str]:
    """Return the names of the layers that a model declares as its output embedding.

    Args:
        model: Any model. One without ``get_output_embeddings`` has none.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module):
        return []
    layers = {id(m) for m in head.modules() if next(m.children(), None) is None}
    return [name for name, module in model.named_modules() if id(module) in layers]


def resolve_exclude(exclude: Sequence[str], model: nn.Module) -> list[str]:
    """Return the patterns of ``exclude`` with the output head of the model for ``lm_head``."""
    head = [literal(name) for name in output_head(model)]
    if OUTPUT_HEAD not in exclude or not head:
        return list(exclude)
    is_name = any(name == OUTPUT_HEAD for name, _ in model.named_modules())
    general = [OUTPUT_HEAD] if is_name else []
    return list(dict.fromkeys([*general, *head, *(p for p in exclude if p != OUTPUT_HEAD)]))


def resolve_names(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the names of a model, as far as no data has to run.

    The output head stands for ``lm_head`` in ``exclude``. Of ``FUSED_PROJECTIONS``, names
    without a layer in the model are left out.
    """
    groups = config.shared_scale_groups
    if shares_inputs(config):
        endings = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        present = [[ending for ending in group if ending in endings] for group in groups]
        groups = [group for group in present if len(group) > 1]
    exclude = resolve_exclude(config.exclude, model)
    if exclude == config.exclude and groups == config.shared_scale_groups:
        return config
    return replace(config, exclude=exclude, shared_scale_groups=groups)


def add_shared_inputs(config: Config, inputs: Iterable[Sequence[str]]) -> Config:
    """Return the configuration with layers that share an input in its ``shared_scale_groups``.

    Args:
        config: The configuration after ``resolve_names``.
        inputs: For each input that was read, the full names of the layers of one parent module
            that read it (``same_input_groups`` with single layers).
    """
    inputs = [list(group) for group in inputs]
    shared = config.shared_scale_groups
    patterns = [pattern for group in shared for pattern in _patterns(group)]
    groups = [group for group in inputs if len(group) > 1]
    unnamed = [group for group in groups if not all(matches(name, patterns) for name in group)]
    return replace(config, shared_scale_groups=[*shared, *_name_endings(unnamed, inputs)])


def _name_endings(
    groups: Iterable[Sequence[str]], inputs: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return groups of full names as groups of the shortest endings that mean the same.

    Example: ``a.0.q``, ``a.0.k`` and ``a.1.q``, ``a.1.k`` become ``[["q", "k"]]``. Experts that no
    token reached are in no group, and have the endings of the experts that were reached. An ending
    gets longer where layers of the same names do not share an input in another parent:
    ``self_attn.k_proj`` beside ``cross_attn.k_proj``.
    """
    by_parent: dict[str, list[set[str]]] = defaultdict(list)
    for group in inputs:
        by_parent[group[0].rpartition(".")[0]].append(set(group))
    exact: dict[tuple[str, ...], bool] = {}
    for group in groups:
        for depth in range(1, 1 + max(name.count(".") for name in group) + 1):
            endings = tuple(".".join(name.split(".")[-depth:]) for name in group)
            if endings not in exact:
                exact[endings] = _is_exact(endings, by_parent)
            if exact[endings]:
                break
    return [list(endings) for endings, is_exact in exact.items() if is_exact]


def _is_exact(endings: Sequence[str], by_parent: Mapping[str, list[set[str]]]) -> bool:
    """Whether in every parent the layers with these endings share one input."""
    for groups in by_parent.values():
        hit = {name for group in groups for name in group if matches(name, _patterns(endings))}
        if hit and not any(hit <= group for group in groups):
            return False
    return True


def _patterns(endings: Iterable[str]) -> list[str]:
    return [pattern for ending in endings for pattern in (ending, f"*.{ending}")]
