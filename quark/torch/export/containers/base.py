"""The protocol of containers: the kinds of files that hold a quantized model."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.torch.export.checkpoint_contents import Contents
from quark.torch.export.containers.registry import CONTAINERS, load_container
from quark.torch.files import Target
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.name_lookup import one_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.dequantized import FloatReader
    from quark.torch.export.checkpoint.reader import Loading
    from quark.torch.export.verification import Verdict


SHARD_SIZE = "5GB"


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of an export; each container uses those that concern it.

    Attributes:
        custom_mode: Checkpoint format, a name of ``FORMATS``.
        options: How tensors are packed and scales are merged.
        quant_config: How the model was quantized; None: what the model remembers.
        tokenizer: Tokenizer to write next to the tensors.
        tokenizer_path: Directory or file to load the tokenizer from, for containers that hold its
            tokens.
        max_shard_size: Size above which tensors are split into several files.
        file_name: Name of the file of tensors, or the first part of several names, without its
            suffix.
        inputs: Example inputs of the model, for containers that hold a graph; None: token ids.
        graph: Options of the graph, None for the defaults.
        announce: Called with the directory when it is complete, before it takes its place.
        card: Writes the model card into the directory, when the model is in it.
    """

    custom_mode: str = "quark"
    options: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    quant_config: Config | None = None
    tokenizer: Any | None = None
    tokenizer_path: str | Path | None = None
    max_shard_size: str | int = SHARD_SIZE
    file_name: str = "model"
    inputs: Any = None
    graph: Any = None
    announce: Callable[[Path], None] | None = None
    card: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.quant_config, (Config, type(None))):
            raise TypeError(
                f"quant_config: expected a Config, got a {type(self.quant_config).__name__}. Leave "
                "it out: the model remembers it. A tokenizer goes by name, tokenizer=tokenizer."
            )
        if self.tokenizer is not None and not hasattr(self.tokenizer, "save_pretrained"):
            given = self.tokenizer if isinstance(self.tokenizer, str) else "DIRECTORY"
            raise TypeError(
                f"tokenizer: expected a tokenizer, got a {type(self.tokenizer).__name__}. Load it: "
                f"AutoTokenizer.from_pretrained({given!r})."
            )


class Container(ABC):
    """A kind of file that holds a quantized model: how it is recognized, read and written.

    Attributes:
        name: Name in ``CONTAINERS``.
        title: What messages call one, such as "a GGUF file".
        patterns: Patterns of the names of the files that hold weights.
        has_formats: Whether it holds any of ``FORMATS``, chosen by ``custom_mode``.
        has_config_json: Whether it writes a ``config.json``: two such cannot share a directory.
        is_read: Whether files of this kind are read back, or only written.
        whole_because: Why a model must be in memory to be written; "" if it may be read in parts.
    """

    name: str
    title: str
    patterns: tuple[str, ...]
    has_formats = False
    has_config_json = False
    is_read = True
    whole_because = "its file is written at once"

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Whether a file or directory is one of this kind, by its names and first bytes."""

    def is_quantized(self, path: Path) -> bool:
        """Whether it holds a quantized model, of a known method or not.

        Raises:
            ValueError: A file is damaged.
        """
        return True

    def holds_other_model(self, path: Path) -> bool:
        """Whether it holds a model that Transformers loads: in float, or of an unknown method.

        Raises:
            ValueError: A file is damaged.
        """
        return False

    def open(self, path: Path, trust_remote_code: bool = False, **options: Any) -> Loading:
        """Return a model that is ready for the tensors of a checkpoint, headers checked.

        Args:
            path: The file or directory.
            trust_remote_code: Passed to Transformers.
            options: Passed to Transformers where the model is built.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: A file is damaged or not understood, or files of this kind are not read.
        """
        raise self._not_read(path)

    def architecture(
        self, path: Path, trust_remote_code: bool = False, **options: Any
    ) -> nn.Module:
        """Return the float model that a checkpoint describes, on the meta device.

        Args:
            path: The file or directory.
            trust_remote_code: Passed to Transformers.
            options: Passed to Transformers where the model is built.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: A file is damaged or not understood, or files of this kind are not read.
        """
        raise self._not_read(path)

    def has_codes(self, path: Path) -> bool:
        """Whether the codes of a quantized model are read; otherwise only its values are.

        Raises:
            ValueError: A file is damaged.
        """
        return True

    def open_in_float(
        self,
        path: Path,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> tuple[nn.Module, FloatReader]:
        """Return the float model of a quantized checkpoint, without values, and their reader.

        Args:
            path: The file or directory.
            dtype: Type of the float parameters; None for the type of the checkpoint.
            trust_remote_code: Passed to Transformers.
            options: Passed to Transformers where the model is built.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: A file is damaged or not understood, or files of this kind are not read.
        """
        from quark.torch.export.checkpoint.dequantized import DequantizedReader
        from quark.torch.export.checkpoint.reader import cast_float_parameters

        loading = self.open(path, trust_remote_code, **options)
        model = self.architecture(path, trust_remote_code, **options)
        if dtype is not None:
            cast_float_parameters(model, dtype)
        reader = DequantizedReader(loading, model, dtype)
        reader.adapt(model)
        return model, reader

    def contents(self, path: Path) -> Contents:
        """Return what a checkpoint holds, from its headers alone.

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: A file is damaged, or files of this kind are not read.
        """
        raise self._not_read(path)

    def tokenizer(self, path: Path) -> Any | None:
        """Return an object whose ``save_pretrained`` writes the tokenizer of a checkpoint."""
        return None

    def check_installed(self) -> None:  # noqa: B027 - most need nothing
        """Check that the packages that ``write`` needs are installed.

        Raises:
            ImportError: One is missing.
        """

    def check_verifiable(self, dtypes: Collection[str]) -> None:  # noqa: B027
        """Check that the target software is installed and can run a model.

        Args:
            dtypes: Names of the types of its parameters, such as ``bfloat16``.

        Raises:
            ImportError: The software is missing, and nothing else can open the file.
            ValueError: It does not compute in one of these types.
        """

    def check_config(self, layers: Iterable[QuantizationConfig]) -> None:  # noqa: B027
        """Check that layers quantized like this can be held, before a model is loaded.

        Raises:
            ValueError: One cannot.
        """

    def check_in_memory(self, model: nn.Module) -> None:
        """Check that a model that is read in parts can be written.

        Raises:
            ValueError: It cannot. The message has the reason.
        """
        from quark.torch.graph.residency import residency_of

        if self.whole_because and residency_of(model) is not None:
            raise ValueError(
                f"The model is read in parts, and {self.title} needs all of it in memory: "
                f"{self.whole_because}. Leave max_memory (--max_memory) out on a larger machine, "
                f"or write safetensors (hf_format), and 'quark convert --to {self.name}' there."
            )

    @abstractmethod
    def check_writable(self, model: nn.Module, settings: ExportSettings) -> None:
        """Check that a quantized model can be held. Its tensors may be on the meta device.

        Raises:
            ValueError: It is not quantized or not frozen, or cannot be held.
        """

    @abstractmethod
    def write(self, model: nn.Module, target: Target, settings: ExportSettings) -> None:
        """Write a frozen model, which is not changed.

        Args:
            model: The model.
            target: Called with the number of bytes that will be written, when everything is checked
                and ready; gives the directory to write to.
            settings: Settings of the export.

        Raises:
            ImportError: A package is missing.
            OSError: The disk is too full.
            ValueError: The model cannot be held.
        """

    @abstractmethod
    def verify(
        self, path: Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
    ) -> Verdict:
        """Open what was written with the target software, and compare it with ``model``.

        Args:
            path: The file or directory.
            model: The model that was written.
            trust_remote_code: Passed to Transformers.
            inputs: Inputs to compare outputs on; None: random token ids.

        Raises:
            ImportError: The target software is missing, and nothing else can open the file.
            ValueError: The outputs differ, or nothing can open the file.
        """

    def load_code(self, path: Path) -> str:
        """Return a line of Python that loads what was written, with what this machine has.

        The default is that of this package, which reads every kind of file that ``is_read``.
        """
        where = in_quotes(path)
        return f"model = quark.torch.import_model_from_safetensors(None, {where})"

    def serve_command(self, path: Path) -> str | None:
        """Return the command of a server that reads such files; None, the default, without one.

        Whether the server computes a scheme depends on its release.
        """
        return None

    def loader(self, path: Path, trust_remote_code: bool = False) -> Callable[[], nn.Module]:
        """Return a function that loads a checkpoint of this kind."""
        return lambda: self.open(path, trust_remote_code).fill()

    def size(self, path: Path) -> int:
        """Return the bytes that the files with weights take, 0 if there are none."""
        if path.is_file():
            return path.stat().st_size
        files = {file for pattern in self.patterns for file in path.glob(pattern)}
        return sum(file.stat().st_size for file in files)

    def _not_read(self, path: Path) -> ValueError:
        return ValueError(
            f"{path} is {self.title}, which is written but not read: give the checkpoint that it "
            "was made of."
        )


def in_quotes(path: Path) -> str:
    """Return a path as a string literal of Python; letters of other alphabets are not escaped."""
    return json.dumps(str(path), ensure_ascii=False)


def get_container(name: str) -> Container:
    """Return the container called ``name``.

    Raises:
        ValueError: No container has that name.
    """
    container: Container = load_container(one_of(name, CONTAINERS, "container"))()
    return container
