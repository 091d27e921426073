"""Tensors of the rotations that ``transforms`` describes: read and written."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.export.formats.transforms import ROTATION, STORED, SYLVESTER, InputTransform
from quark.torch.numerics.hadamard import hadamard
from quark.torch.quantization.config.algo import OnlineRotationConfig, RotationConfig

_SAMPLES, _TOLERANCE = 8, 1e-4  # of the check that a matrix is orthogonal


class TransformReader:
    """Tensors of another reader, where rotations of inputs have the names that layers give them.

    Args:
        reader: Reader of the checkpoint, with the names of the model.
        model: The float model.
        transforms: Result of ``read_transforms``.
        quantized: Names of the layers that are stored quantized.

    Attributes:
        entries: Headers by name.
        algorithms: Rotations for the configuration of the model.

    Raises:
        ValueError: A layer is in float or has two rotations, or its matrix is missing, is not
            orthogonal or does not fit.
    """

    def __init__(
        self,
        reader: Any,
        model: nn.Module,
        transforms: Sequence[InputTransform],
        quantized: Collection[str],
    ) -> None:
        self.reader = reader
        self._sources: dict[str, tuple[str, bool]] = {}  # name -> stored name, is inverse
        ends = tuple(f".{t.group}_input.{part}" for t in transforms for part in ("weight", "perm"))
        self._hidden = {key for key in reader.entries if key.endswith(ends)}
        self.entries = {k: e for k, e in reader.entries.items() if k not in self._hidden}
        kinds: dict[tuple[str, bool], torch.Tensor] = {}
        layers: dict[tuple[int, torch.dtype], list[str]] = {}
        linear = {n: m.in_features for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        for transform in transforms:
            for name in filter(transform.matches, linear):
                _check_layer(name, name in quantized, f"{name}.{ROTATION}" in self.entries)
                key = self._stored_key(transform, name, transform.size or linear[name])
                source = key, transform.is_inverse
                if source not in kinds:
                    kinds[source] = self._matrix(*source).to("meta")
                size, dtype = len(kinds[source]), kinds[source].dtype
                _check_width(name, linear[name], size)
                self._sources[f"{name}.{ROTATION}"] = source
                self.entries[f"{name}.{ROTATION}"] = TensorHeader(
                    reader.entries[key].file, (size, size), dtype
                )
                layers.setdefault((size, dtype), []).append(name)
        for key in [key for key in self._hidden if not self._belongs(key)]:
            self._hidden.remove(key)
            self.entries[key] = reader.entries[key]
        self.algorithms = [
            _rotation_config(size, dtype, names) for (size, dtype), names in layers.items()
        ]

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        source = self._sources.get(key)
        tensor: torch.Tensor = self.reader.tensor(key) if source is None else self._matrix(*source)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self.reader.tensors():
            if key not in self._hidden:
                yield key, tensor
        for key, source in self._sources.items():
            yield key, self._matrix(*source)

    def _belongs(self, key: str) -> bool:
        """Whether a stored matrix belongs to a layer that is rotated."""
        layer = key.rpartition(".")[0].rpartition(".")[0]
        return f"{layer}.{ROTATION}" in self._sources

    def _stored_key(self, transform: InputTransform, name: str, size: int) -> str:
        """Return the name of a stored matrix: that of the layer, or another of its group.

        Tools that share a matrix between layers store it once.
        """
        end = f".{transform.group}_input.weight"
        keys = [f"{name}{end}", *sorted(key for key in self._hidden if key.endswith(end))]
        entries: dict[str, TensorHeader] = self.reader.entries
        keys = [keys[0]] if keys[0] in entries else keys[1:]
        fitting = (k for k in keys if entries[k].shape == (size, size))
        key: str | None = next(fitting, None)
        if key is None:
            raise ValueError(
                f"compressed-tensors: transform_config rotates the inputs of {name}, but no matrix "
                f"{name}{end} of {size} x {size} is stored."
            )
        return key

    def _matrix(self, key: str, is_inverse: bool) -> torch.Tensor:
        """Return a rotation: int8 of +1 and -1, or float64.

        Raises:
            ValueError: It is not orthogonal.
        """
        matrix: torch.Tensor = self.reader.tensor(key).double()
        order = f"{key.removesuffix('weight')}perm"
        if order in self.reader.entries:
            places = self.reader.tensor(order)
            if not places.sort().values.equal(torch.arange(len(matrix), device="cpu").to(places)):
                raise ValueError(f"{order} is not an order of {len(matrix)} rows.")
            matrix = matrix[places.long()][:, places.long()]
        matrix = (matrix.T if is_inverse else matrix).contiguous()
        rotation = matrix / math.sqrt(len(matrix))
        # R Rᵀ x = x for a few random x: for all x, almost surely, and much faster than R Rᵀ = I.
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(
            len(matrix), _SAMPLES, generator=generator, dtype=torch.float64, device="cpu"
        )
        if not (rotation @ (rotation.T @ x) - x).abs().max() < _TOLERANCE:
            raise ValueError(f"{key} is not orthogonal: the checkpoint is damaged.")
        is_signs = bool((matrix.abs() == 1).all())
        return matrix.to(torch.int8) if is_signs else rotation


def _check_layer(name: str, is_quantized: bool, is_rotated: bool) -> None:
    """Check that a layer takes a rotation."""
    if not is_quantized:
        raise ValueError(
            f"compressed-tensors: transform_config rotates the inputs of {name}, which is stored "
            "in float: load the checkpoint with compressed-tensors."
        )
    if is_rotated:
        raise ValueError(f"compressed-tensors: the inputs of {name} have two transforms.")


def _check_width(name: str, width: int, size: int) -> None:
    if width % size:
        raise ValueError(
            f"compressed-tensors: head_dim={size} does not divide the {width} inputs of {name}."
        )


def _rotation_config(size: int, dtype: torch.dtype, names: list[str]) -> RotationConfig:
    """Return the options of rotations of one kind."""
    return RotationConfig(
        r1=False,
        rotation_size=size,
        trainable=dtype.is_floating_point,
        online_config=OnlineRotationConfig(online_rotation_layers=names),
    )


class TransformWriter:
    """Names and groups of the rotations that are written."""

    def __init__(self) -> None:
        self._types: dict[str, tuple[str, int]] = {}
        self._layers: dict[str, list[str]] = {}

    def add(self, rotation: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return the name of a matrix relative to its layer, and the matrix to store.

        Args:
            rotation: Rotation of a layer, int8 of +1 and -1 or float64.

        Raises:
            ValueError: It has no values.
        """
        if rotation.is_meta:
            raise ValueError("its rotation has no values yet: write a model that is in memory.")
        n, rotation = len(rotation), rotation.cpu()
        is_sylvester = n & (n - 1) == 0 and torch.equal(rotation, hadamard(n))
        is_learned = rotation.is_floating_point()
        matrix = (rotation * math.sqrt(n) if is_learned else rotation).float()
        text = hashlib.sha256(matrix.contiguous().numpy().tobytes()).hexdigest()[:8]
        group = f"hadamard_{n}" if is_sylvester else f"rotation_{n}_{text}"
        self._types[group] = SYLVESTER if is_sylvester else STORED, n
        return f"{group}_input.weight", matrix if is_learned else matrix.bfloat16()

    def name(self, key: str) -> None:
        """Record the layer of a stored matrix, by the full name of the matrix."""
        path, _, last = key.rpartition(".")
        layer, _, module = path.rpartition(".")
        group = module.removesuffix("_input")
        if last == "weight" and group in self._types:
            names = self._layers.setdefault(group, [])
            if layer not in names:
                names.append(layer)

    def section(self) -> dict[str, Any]:
        """Return ``transform_config`` in a dict, {} without rotations."""
        groups = {
            group: {
                "apply": [{"ignore": [], "inverse": False, "location": "input", "targets": names}],
                "head_dim": self._types[group][1],
                "randomize": False,
                "requires_grad": False,
                "type": self._types[group][0],
            }
            for group, names in self._layers.items()
        }
        return {"transform_config": {"config_groups": groups}} if groups else {}
