"""The format of MLX, in which mlx-lm serves models on computers of Apple.

Per layer of N outputs and K inputs in groups of g: ``weight`` uint32 [N, K * bits / 32], unsigned
codes; ``scales`` and ``biases`` [N, K/g] in the ``scale_type`` of the weight (``layouts/mlx.py``).
A layer without ``scales`` is in float. ``config.json`` has the object ``quantization``, with
``group_size``, ``bits`` and ``mode`` for all layers, and such an object for each layer that
differs. MLX itself writes no ``quant_method``.

Files of MLX quantize the embedding too. Where it is the output head of the model as well, both
become layers of their own, with the same codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.config_section import (
    read_choice,
    unsigned_weight_spec,
    with_weight_fields,
)
from quark.torch.export.formats.layer_checks import (
    common_problem,
    integer_weight_problem,
    weight_group_size,
    weight_shape,
    weight_spec,
)
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import ScaleType, ZeroPointType

if TYPE_CHECKING:
    import torch

    from quark.torch.export.checkpoint.files import TensorHeader
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MODE = "affine"
_SCALE_TYPES = {
    "float16": ScaleType.float16,
    "bfloat16": ScaleType.bfloat16,
    "float32": ScaleType.float32,
}
_PARTS = ("weight", "scales", "biases")


class MlxFormat(ThirdPartyFormat):
    """Integer weights in groups, each with a scale and a bias."""

    name = "mlx"
    supported = (
        "integer weights of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128 that divide the "
        "inputs, of Linear and Embedding layers, inputs in float"
    )
    tensor_names: ClassVar = {"weight_scale": "scales", "weight_zero_point": "biases"}
    schemes: Mapping[str, tuple[int, int]] = {}  # (group size, bits) of each layer
    aliases: Mapping[str, str] = {}  # further names of tensors -> stored names

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.mlx import MlxLayout

        return MlxLayout()

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer."""
        super().check_writable(layers, float_layers)
        self.schemes = {
            name: (weight_group_size(weight_spec(layer)), weight_spec(layer).fmt.bits)
            for name, layer in layers.items()
        }

    def _common_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, whatever its number format, or None."""
        from torch import nn

        for tensor in ("input", "output"):
            if getattr(layer.quant_config, f"{tensor}_tensors") is not None:
                return f"its {tensor} is quantized"
        return common_problem(layer, (nn.Linear, nn.Embedding))

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        weight = weight_spec(layer)
        zeros_fit = weight.scheme.float_zero_point and not weight.fmt.signed
        plain = replace(weight, zero_point_type=ZeroPointType.int32) if zeros_fit else weight
        problem = integer_weight_problem(plain, BITS)
        group, inputs = weight_group_size(weight), weight_shape(layer)[1]
        if problem is None and (group not in GROUP_SIZES or inputs % group):
            problem = f"its {inputs} inputs have groups of {group}"
        return problem

    def config_section(self) -> dict[str, Any]:
        """Return the object that MLX reads, with the name of the format."""
        ((usual, _),) = Counter(self.schemes.values()).most_common(1)
        others = {n: _entry(one) for n, one in self.schemes.items() if one != usual}
        return {"quant_method": self.name, **_entry(usual), **others}

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return integers in groups for all linear layers and embeddings."""
        layer = QuantizationConfig(weight=_read_spec(section, section))
        paths = section.keys() - {"quant_method", "group_size", "bits", "mode"}
        others: dict[str, QuantizationConfig] = {}
        exclude = []
        for path in sorted(paths):
            given = section[path]
            if given is False:
                exclude.append(literal(path))
            elif isinstance(given, dict):
                others[literal(path)] = QuantizationConfig(weight=_read_spec(section, given))
            elif given is not True:
                raise ValueError(f"quant_method='mlx': {path}={given!r} is not supported.")
        # Embeddings too, which a global configuration skips: layers without scales are left later.
        return Config(layer, layer_quant_config={**others, "*": layer}, exclude=exclude)

    def layer_source(self, reader: Any, tied: Mapping[str, str]) -> Any:
        """Return a reader that has the tensors of a quantized embedding for a tied head too."""
        aliases: dict[str, str] = {}
        for name, source in tied.items():
            layer, origin = name.rpartition(".")[0], source.rpartition(".")[0]
            if name not in reader.entries and f"{origin}.scales" in reader.entries:
                aliases |= {f"{layer}.{part}": f"{origin}.{part}" for part in _PARTS}
        self.aliases = aliases
        return _Aliases(reader, aliases) if aliases else reader

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers in codes, with the types of their scales and zero points.

        Raises:
            ValueError: No layer is stored in codes.
        """
        stored = {}
        for name in layers:
            if _is_stored(name, reader.entries):
                origin = self.aliases.get(f"{name}.weight", name).removesuffix(".weight")
                stored[name] = _as_stored(layers.get(origin, layers[name]), name, reader)
        if not stored:
            raise ValueError("quant_method='mlx', but no weight has scales: all are in float.")
        exclude = [*self.config.exclude, *(literal(n) for n in layers if n not in stored)]
        self.config = replace(
            self.config,
            layer_quant_config={literal(name): layer for name, layer in stored.items()},
            exclude=exclude,
        )
        return stored


class _Aliases:
    """Tensors of another reader, some of them under two names.

    Args:
        reader: The reader.
        origins: Further names -> names in the reader.

    Attributes:
        entries: Headers by name.
    """

    def __init__(self, reader: Any, origins: Mapping[str, str]) -> None:
        self.reader, self.origins = reader, origins
        self.entries: dict[str, TensorHeader] = dict(reader.entries)
        for name, origin in origins.items():
            if origin in self.entries:
                self.entries[name] = self.entries[origin]

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        stored: torch.Tensor = self.reader.tensor(self.origins.get(name, name))
        return stored

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        yield from self.reader.tensors()
        for name in self.origins.keys() & self.entries.keys():
            yield name, self.tensor(name)


def _is_stored(name: str, entries: Mapping[str, TensorHeader]) -> bool:
    """Whether a layer has words of codes, or scales."""
    weight = entries.get(f"{name}.weight")
    return f"{name}.scales" in entries or (
        weight is not None and type_name(weight.dtype) == "uint32"
    )


def _as_stored(layer: QuantizationConfig, name: str, reader: Any) -> QuantizationConfig:
    """Return the configuration of a layer with the types of its scales and zero points."""
    from quark.torch.export.formats.layouts.mlx import integer_zero_points

    assert layer.weight is not None
    entries: dict[str, TensorHeader] = reader.entries
    biases = f"{name}.biases"
    scales = entries.get(f"{name}.scales")
    scale_type = None if scales is None else _SCALE_TYPES.get(type_name(scales.dtype))
    if biases not in entries or scale_type is None:
        return layer  # the check of the headers names what is wrong
    layer = with_weight_fields(layer, scale_type=scale_type)
    assert layer.weight is not None
    scale, offsets = reader.tensor(f"{name}.scales"), reader.tensor(biases)
    is_sound = scale.shape == offsets.shape and scale.dtype == offsets.dtype
    if is_sound and integer_zero_points(scale, offsets, layer.weight.scheme) is None:
        return with_weight_fields(layer, zero_point_type=ZeroPointType.float32)
    return layer


def _entry(scheme: tuple[int, int]) -> dict[str, Any]:
    group, bits = scheme
    return {"group_size": group, "bits": bits, "mode": MODE}


def _read_spec(section: Mapping[str, Any], given: Mapping[str, Any]) -> QuantizationSpec:
    """Return the specification of a weight, from the object for all layers or for one.

    Raises:
        ValueError: A value is missing or not supported.
    """
    known = {"quant_method": section.get("quant_method")}
    read_choice({**known, "mode": given.get("mode", MODE)}, "mode", (MODE,), MODE)
    bits = read_choice({**known, "bits": given.get("bits")}, "bits", BITS, None)
    sizes = {**known, "group_size": given.get("group_size")}
    group = read_choice(sizes, "group_size", GROUP_SIZES, None)
    return unsigned_weight_spec(bits, group, symmetric=False)
