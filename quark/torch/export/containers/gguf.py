"""One GGUF file, for llama.cpp and the software built on it."""

from __future__ import annotations

import logging
import math
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.torch.export.checkpoint.config_json import CONFIG
from quark.torch.export.checkpoint_contents import Contents, LayerSummary, Summary, by_type
from quark.torch.export.containers.base import Container, ExportSettings, in_quotes
from quark.torch.export.gguf.reader import MAGIC, GgufFile
from quark.torch.files import Target
from quark.torch.quantization.config.description import LayerDescription

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.dequantized import FloatReader
    from quark.torch.export.checkpoint.reader import Loading
    from quark.torch.export.verification import Verdict


SUFFIX = ".gguf"
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PACKAGES = {"gguf": "gguf"}  # module -> distribution that Transformers reads it with

logger = logging.getLogger(__name__)


class Gguf(Container):
    """A file with the weights, the tokens and the metadata of a model."""

    name = "gguf"
    title = "a GGUF file"
    patterns = (f"*{SUFFIX}",)
    whole_because = ""

    def holds(self, path: Path) -> bool:
        """Whether a path is a GGUF file, or a directory with one and without ``config.json``."""
        if path.is_dir():
            return any(path.glob(f"*{SUFFIX}")) and not (path / CONFIG).is_file()
        return path.suffix == SUFFIX or _begins_with_magic(path)

    def open(self, path: Path, trust_remote_code: bool = False, **options: Any) -> Loading:
        """Return a model that is ready for the tensors; see ``Container.open``."""
        from quark.torch.export.checkpoint.reader import prepare_load
        from quark.torch.export.gguf.importer import open_gguf

        return prepare_load(*open_gguf(self.file(path), **options))

    def architecture(
        self, path: Path, trust_remote_code: bool = False, **options: Any
    ) -> nn.Module:
        """Return the float model of a file; see ``Container.architecture``."""
        from quark.torch.export.gguf.matching import match_gguf

        return match_gguf(self.file(path), **options).model

    def has_codes(self, path: Path) -> bool:
        """Whether a file has blocks, and all of them are of types whose codes are read."""
        from quark.torch.export.gguf.blocks import has_codes
        from quark.torch.export.gguf.matching import FLOAT_TYPES

        kinds = {tensor.kind for tensor in GgufFile(self.file(path)).tensors.values()}
        blocks = kinds - FLOAT_TYPES.keys()
        return bool(blocks) and all(map(has_codes, blocks))

    def open_in_float(
        self,
        path: Path,
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> tuple[nn.Module, FloatReader]:
        """Return the float model of a file of any type; see ``Container.open_in_float``."""
        from quark.torch.export.gguf.float_reader import open_gguf_in_float

        return open_gguf_in_float(self.file(path), dtype, **options)

    def contents(self, path: Path) -> Contents:
        """Return what a file holds: the type of its blocks says how a weight is quantized."""
        file = GgufFile(self.file(path))
        layers, floats = [], []
        for name, (kind, shape, _, size) in file.tensors.items():
            count = math.prod(shape)
            if kind in _FLOATS:
                floats.append((_FLOATS[kind], count, size))
            else:
                words = LayerDescription(weight=kind)
                layers.append(LayerSummary(name.removesuffix(".weight"), words, count, 8 * size))
        total = sum(tensor.bytes for tensor in file.tensors.values())
        return Contents(
            str(file.values.get("general.architecture", "unknown type")),
            {"quant_method": "gguf", "version": file.version},
            "",
            Summary(tuple(layers), by_type(floats), total),
        )

    def tokenizer(self, path: Path) -> Any | None:
        """Return the tokenizer; None, with a warning, if Transformers cannot make it."""
        from quark.torch.export.gguf.tokenizer import load_tokenizer

        try:
            return load_tokenizer(self.file(path))
        except ValueError as error:
            logger.warning("%s", error)
            return None

    def check_installed(self) -> None:
        """Check that the package gguf is installed."""
        from quark.torch.export.gguf.architectures import import_gguf

        import_gguf()

    def check_writable(self, model: nn.Module, settings: ExportSettings) -> None:
        """Check that blocks can hold every layer; see ``Container.check_writable``."""
        from quark.torch.export.gguf.writer import check_header, check_writable

        check_writable(model)
        check_header(model, _tokenizer_path(settings))

    def write(self, model: nn.Module, target: Target, settings: ExportSettings) -> None:
        """Write the file and its tokens, loaded from ``settings.tokenizer_path``."""
        from quark.torch.export.gguf.writer import write_gguf

        write_gguf(model, target, settings.file_name, _tokenizer_path(settings))

    def verify(
        self, path: Path, model: nn.Module, trust_remote_code: bool = False, inputs: Any = None
    ) -> Verdict:
        """Compare predictions with those of Transformers, or of this package where it fails."""
        from quark.torch.export.gguf.rope import is_scaled
        from quark.torch.export.verification import verify_own, verify_predictions

        path = self.file(path)
        if is_scaled(GgufFile(path)):
            note = "Transformers leaves out the scaling of rotary embedding"
            return verify_own(model, self.size(path), self.loader(path, trust_remote_code), note)
        return verify_predictions(
            path,
            model,
            _PACKAGES,
            self.size(path),
            self.loader(path, trust_remote_code),
            trust_remote_code,
        )

    def load_code(self, path: Path) -> str:
        """Return the line that loads the file with llama.cpp, or with this package without it."""
        if find_spec("llama_cpp") is None:
            return super().load_code(self.file(path))
        return f"model = llama_cpp.Llama(model_path={in_quotes(self.file(path))})"

    def serve_command(self, path: Path) -> str:
        """Return the command of llama.cpp."""
        return shlex.join(["llama-cli", "-m", str(self.file(path))])

    def file(self, path: Path) -> Path:
        """Return the file that a path means.

        Raises:
            ValueError: A directory has several.
        """
        if not path.is_dir():
            return path
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            raise ValueError(f"{path} has {len(files)} GGUF files: name one of them.")
        return files[0] if files else path / f"model{SUFFIX}"


def _tokenizer_path(settings: ExportSettings) -> str | Path:
    if settings.tokenizer_path is None:
        raise ValueError("A GGUF file holds the tokens: give tokenizer_path.")
    return settings.tokenizer_path


def _begins_with_magic(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
