"""The residual stream as ``scaling_layers`` of a rotation configuration file names it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quark.torch.graph.structure import ResidualStream, StreamNorm, StreamWeight, ValueHeads
from quark.torch.quantization.config.algo import RotationConfig
from quark.torch.quantization.config.name_lookup import nearest
from quark.torch.quantization.nn.layer import float_class, input_axis

_KEYS = {"prev_modules": list, "norm_module": str, "next_modules": list}
_Modules = dict[str, nn.Module]


def stream_from_config(model: nn.Module, options: RotationConfig) -> ResidualStream:
    """Return the residual stream that the options name. It is not proved.

    ``scaling_layers`` has the lists ``first_layer``, ``middle_layers`` and ``last_layer`` of
    dictionaries with ``prev_modules``, ``norm_module`` and ``next_modules``. In the names,
    ``layer_id`` and ``pre_layer_id`` stand for the index of a decoder block and that before it.

    Raises:
        ValueError: ``scaling_layers`` has another form, or names modules that the model lacks.
    """
    modules = dict(model.named_modules())
    entries = list(_read_entries(options, modules))
    if not entries:
        raise ValueError(
            "rotation: scaling_layers has no entries for a model with so few decoder blocks."
        )
    names = list(dict.fromkeys(name for e in entries for name in e["prev_modules"]))
    tables = [name for name in names if isinstance(modules[name], nn.Embedding)]
    writers = [name for name in names if name not in tables]
    readers = [
        StreamWeight(f"{name}.weight", _find_axis(modules[name], 1), e["norm_module"])
        for e in entries
        for name in e["next_modules"]
    ]
    embedded = {id(modules[name].weight) for name in tables}
    heads = [r for r in readers if id(model.get_parameter(r.parameter)) in embedded]
    stream = ResidualStream(
        size=_find_gain(entries[0]["norm_module"], modules).numel(),
        embeddings=tuple(StreamWeight(f"{name}.weight", 1) for name in tables),
        writers=tuple(StreamWeight(f"{n}.weight", _find_axis(modules[n], 0)) for n in writers),
        biases=tuple(StreamWeight(f"{n}.bias", 0) for n in writers if _has_bias(modules[n])),
        readers=tuple(readers),
        norms=tuple(_classify_norm(e["norm_module"], modules) for e in entries),
        head=heads[0].parameter.removesuffix(".weight") if heads else "",
        tied=bool(heads),
        value_heads=tuple(_find_value_heads(options, model, modules) if options.r2 else ()),
        down_projections=tuple(name for name in writers if not name.endswith(options.o_proj)),
    )
    _check_sizes(model, stream)
    return stream


def _check_sizes(model: nn.Module, stream: ResidualStream) -> None:
    for weight in (*stream.embeddings, *stream.writers, *stream.biases, *stream.readers):
        shape = tuple(model.get_parameter(weight.parameter).shape)
        if shape[weight.axis] != stream.size:
            raise ValueError(
                f"rotation: {weight.parameter} of shape {shape} does not fit the residual stream: "
                f"axis {weight.axis} should have the {stream.size} channels of its norms."
            )


def _read_entries(options: RotationConfig, modules: _Modules) -> Iterator[dict[str, Any]]:
    layers = options.scaling_layers
    parts = layers if isinstance(layers, dict) else {}
    if not any(parts.values()) or set(parts) - {"first_layer", "middle_layers", "last_layer"}:
        raise ValueError(
            "rotation: scaling_layers must be an object with first_layer, middle_layers and "
            f"last_layer, got {str(layers)[:80]}."
        )
    count = len(_list_blocks(options, modules))
    places = [("first_layer", 0), *(("middle_layers", i) for i in range(1, count))]
    for part, index in [*places, ("last_layer", count - 1)]:
        entries = parts.get(part) or []
        if not isinstance(entries, list):
            raise ValueError(f"rotation: {part} needs a list of entries, got {str(entries)[:80]}.")
        for entry in entries:
            given = entry if isinstance(entry, dict) else {}
            names = [*_names(given.get("prev_modules")), *_names(given.get("next_modules"))]
            are_names = bool(names) and all(isinstance(name, str) for name in names)
            if not are_names or not all(isinstance(given.get(k), t) for k, t in _KEYS.items()):
                raise ValueError(
                    f"rotation: an entry of {part} needs prev_modules and next_modules (lists of "
                    f"names) and norm_module (a name), got {str(entry)[:80]}."
                )
            named = {key: _insert_index(entry[key], index, modules) for key in _KEYS}
            for name in (*named["prev_modules"], *named["next_modules"]):
                weight = getattr(modules[name], "weight", None)
                if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
                    raise ValueError(f"rotation: {name} in {part} has no weight with two axes.")
            yield named


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _insert_index(names: Any, index: int, modules: _Modules) -> Any:
    """Insert the index of a block into a name or a list of names, and check that these exist."""
    if isinstance(names, list):
        return [_insert_index(name, index, modules) for name in names]
    name = str(names).replace("pre_layer_id", str(index - 1)).replace("layer_id", str(index))
    return _check_exists(name, modules)


def _check_exists(name: str, modules: _Modules) -> str:
    if name not in modules:
        near = "".join(f" Did you mean {n!r}?" for n in nearest(name, modules, 1))
        raise ValueError(f"rotation: the model has no module {name!r}.{near}")
    return name


def _list_blocks(options: RotationConfig, modules: _Modules) -> list[str]:
    decoder = _check_exists(options.model_decoder_layers, modules)
    return [f"{decoder}.{name}" for name, _ in modules[decoder].named_children()]


def _find_axis(module: nn.Module, axis: int) -> int:
    """Return the axis of a module's weight for axis 0 or 1 of the matrix (outputs, inputs)."""
    return axis if input_axis(float_class(module)) == 1 else 1 - axis


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "bias", None) is not None


def _find_gain(name: str, modules: _Modules) -> torch.Tensor:
    gain = getattr(modules[name], "weight", None)
    if not isinstance(gain, torch.Tensor) or gain.dim() != 1:
        raise ValueError(f"rotation: norm_module {name} has no weight (channels,).")
    return gain


@torch.no_grad()
def _classify_norm(name: str, modules: _Modules) -> StreamNorm:
    """Find by a trial run what a norm adds to its weight, and whether it subtracts the mean."""
    gain, norm = _find_gain(name, modules), modules[name]
    trial = copy.deepcopy(norm).float()
    generator = torch.Generator().manual_seed(0)
    # Large values, so that eps does not matter.
    x = 100 * torch.randn(
        4, gain.numel(), generator=generator, dtype=torch.float32, device="cpu"
    ).to(gain.device)
    odd = (trial(x) - trial(-x)) / 2  # without the bias
    for kind in ("rms", "layer"):
        vectors = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        unit = vectors * vectors.square().mean(-1, keepdim=True).rsqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(odd, unit * (gain.float() + offset), rtol=1e-3, atol=1e-3):
                bias = f"{name}.bias" if _has_bias(norm) else None
                return StreamNorm(name, kind, f"{name}.weight", offset, bias)
    raise ValueError(
        f"rotation: {name} ({type(norm).__name__}) is neither an RMS norm nor a layer norm."
    )


def _find_value_heads(
    options: RotationConfig, model: nn.Module, modules: _Modules
) -> Iterator[ValueHeads]:
    config: Any = getattr(model, "config", None)
    size = getattr(config, "head_dim", None)
    if size is None and hasattr(config, "num_attention_heads"):
        size = config.hidden_size // config.num_attention_heads
    if size is None:
        raise ValueError("rotation: r2 needs a model whose config has head_dim. Set r2=False.")
    for block in _list_blocks(options, modules):
        v, o = (
            _check_exists(f"{block}.{name}", modules) for name in (options.v_proj, options.o_proj)
        )
        rows_axis, columns_axis = _find_axis(modules[v], 0), _find_axis(modules[o], 1)
        sources = [(f"{v}.weight", rows_axis)] + [(f"{v}.bias", 0)] * _has_bias(modules[v])
        positions: list[torch.Tensor] = [
            torch.arange(model.get_parameter(f"{name}.weight").shape[axis], device="cpu")
            for name, axis in ((v, rows_axis), (o, columns_axis))
        ]
        if any(len(p) % size for p in positions):
            raise ValueError(
                f"rotation: {v} and {o} have no heads of {size} channels (head_dim of the config). "
                "Set r2=False."
            )
        rows, columns = (p.view(-1, size) for p in positions)
        output = (f"{o}.weight", columns_axis)
        yield ValueHeads(block, tuple(sources), output, rows, columns)
