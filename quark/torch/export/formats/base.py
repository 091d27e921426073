"""The interface of a checkpoint format: how quantized layers are stored as tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.registry import FORMATS, load_format
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.spec import QuantizationSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.headers import Entry
    from quark.torch.quantization.nn.layer import QuantizedLayer


class ExportFormat(ABC):
    """A checkpoint format: the layout of tensors, their names, and the section of config.json.

    The same class writes and reads. Writing calls ``check_model`` and ``check_writable``, then
    ``layer_tensors`` and ``stored_name`` for each layer, ``join`` for the tensors of a block, then
    ``config_section``. Reading calls ``from_section``,
    ``check_readable``, ``stored_layers``, ``prepare_for_load`` for each layer, then ``state_name``
    and ``convert_loaded`` for each tensor.

    Args:
        config: Configuration of the model.
        options: Options of the export.

    Attributes:
        name: Name in ``FORMATS``.
        transformers_packages: Modules -> distributions that Transformers needs to load it; None if
            not every machine can load it. ``{}``: Transformers alone loads it.
        needs_gpu_for_inputs: Whether Transformers quantizes inputs on a GPU alone. On a CPU, it
            dequantizes the weights and leaves inputs in float.
        stores_rotated_keys: Whether the section can say that keys are rotated before they are
            quantized.
        stores_probabilities: Whether it can say that probabilities of attention are quantized.
        needs_headers: Whether it describes tensors in the headers of safetensors.
    """

    name: str
    needs_headers = False
    stores_rotated_keys = False
    stores_probabilities = False
    transformers_packages: ClassVar[Mapping[str, str] | None] = None
    needs_gpu_for_inputs: ClassVar[bool] = False

    def __init__(self, config: Config, options: JsonExporterConfig) -> None:
        self.config = config
        self.options = options

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return the configuration that a ``quantization_config`` describes.

        Raises:
            ValueError: The section has a key or a value that is not supported.
        """
        return Config.from_dict(section)

    @classmethod
    def from_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format that reads a checkpoint with this ``quantization_config``.

        Raises:
            ValueError: The section has a key or a value that is not supported.
        """
        config = cls.parse_section(section)
        return cls(config, config.export or JsonExporterConfig())

    def check_readable(self) -> None:  # noqa: B027  # most formats need no check
        """Check that a checkpoint of this configuration can be read, before any work.

        The default accepts all.

        Raises:
            ValueError: It cannot.
        """

    def layer_source(self, reader: Any, tied: Mapping[str, str]) -> Any:
        """Return the reader that ``stored_layers`` and all later steps take.

        Formats that store a layer once that a model has twice add its other name here. The default
        returns the reader itself.

        Args:
            reader: Reader of the checkpoint.
            tied: Names of tied tensors of the model -> names of the tensors they are tied to.
        """
        return reader

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers that the checkpoint stores quantized, before any is loaded.

        Args:
            layers: Layers that the configuration quantizes, by name.
            reader: Reader of the checkpoint's tensors, by the names of the model.

        Raises:
            ValueError: The checkpoint stores something that cannot be loaded.
        """
        return layers

    def layer_reader(self, reader: Any, model: nn.Module) -> Any:
        """Return a reader with the tensors that layers are loaded from.

        Formats that store layers of experts stacked split them here. The default returns the
        reader itself.

        Args:
            reader: Reader of the checkpoint, with the names of the model.
            model: The float model, whose experts are split as in ``stored_layers``.
        """
        return reader

    def check_writable(  # noqa: B027
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check that the format can hold every layer, before anything is written.

        The default accepts all layers.

        Args:
            layers: Quantized layers, by their names in the model and in the checkpoint.
            float_layers: Names of the layers in float, in the model and in the checkpoint.

        Raises:
            ValueError: The format cannot hold a layer.
        """

    def check_model(self, model: nn.Module) -> None:  # noqa: B027
        """Check that the format can hold the structure of a model, before ``check_writable``.

        The default accepts all.

        Args:
            model: The model, with split experts.

        Raises:
            ValueError: It cannot.
        """

    def is_joined(self, key: str) -> bool:
        """Whether ``join`` makes a tensor, by its stored name, part of one of several layers."""
        return False

    def join(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of whole blocks by their stored names, with several layers in one.

        Formats that store layers of experts stacked stack them here. The default returns the same.

        Args:
            state: Tensors by ``stored_name``; all or none of those that become one.
        """
        return state

    @abstractmethod
    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantized layer, by name relative to the layer.

        Args:
            layer: A quantized layer. It is not changed.
            scales: Scales that replace the layer's own, by tensor of the configuration.
        """

    @abstractmethod
    def prepare_for_load(self, module: nn.Module, layer: QuantizationConfig) -> nn.Module:
        """Replace a float layer in place by an empty one that accepts the stored tensors."""

    @abstractmethod
    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``, "" if unused."""

    def convert_loaded(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value in the model's state of the tensor stored as ``key``."""
        return tensor

    def stored_name(self, key: str) -> str:
        """Return the full name in the checkpoint of ``<layer>.<name from layer_tensors>``."""
        return key

    def file_metadata(self, entries: Mapping[str, Entry]) -> dict[str, str]:
        """Return texts for the header of each file of a checkpoint, by name.

        The default has none.

        Args:
            entries: Shape and type of every tensor of the checkpoint, by stored names.
        """
        return {}

    def weight_count(self, spec: QuantizationSpec, codes: Entry, scale: Entry | None) -> int:
        """Return the number of weights of a layer, from headers alone.

        Codes that fill the last word of a row are counted too.

        Args:
            spec: Specification of the weight.
            codes: Header of its codes.
            scale: Header of its scales, None if there are none.
        """
        return 8 * codes.nbytes // spec.fmt.bits

    @abstractmethod
    def config_section(self) -> dict[str, Any]:
        """Return ``quantization_config`` for ``config.json``."""


def get_format(name: str, config: Config, options: JsonExporterConfig) -> ExportFormat:
    """Return the checkpoint format called ``name``, one that is written.

    Raises:
        ValueError: No format has that name.
    """
    return format_class(one_of(name, FORMATS, "custom_mode"))(config, options)


def format_class(name: str) -> type[ExportFormat]:
    """Return the class of the checkpoint format called ``name``.

    Raises:
        ValueError: No format has that name.
    """
    cls: type[ExportFormat] = load_format(one_of(name, FORMATS, "quant_method"))
    return cls
