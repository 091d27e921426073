"""Checkpoints of every method that is read here, opened without being told which one it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quark.torch.export.checkpoint.architecture import empty_model, read_config
from quark.torch.export.checkpoint.config_json import CONFIG, read_description
from quark.torch.export.checkpoint.files import NATIVE, CheckpointReader, NativeReader
from quark.torch.export.checkpoint.reader import Loading, format_of, ready
from quark.torch.export.gguf.importer import open_gguf

GGUF = "gguf"


def open_checkpoint(source: str | Path, trust_remote_code: bool = False, **options: Any) -> Loading:
    """Return a model that is ready for the tensors of a checkpoint, headers checked.

    Args:
        source: Directory of a checkpoint, or a GGUF file.
        trust_remote_code: Passed to Transformers.
        options: Passed to Transformers where the model is built, such as ``attn_implementation``.

    Raises:
        FileNotFoundError: Files are missing.
        ValueError: A file is damaged, or says something that is not understood.
    """
    source = Path(source)
    file = gguf_of(source)
    if file is not None:
        return ready(*open_gguf(file))
    fmt = format_of(read_description(source), str(source / CONFIG))
    native = (source / NATIVE).is_file() and not any(source.glob("*.safetensors"))
    reader = (NativeReader if native else CheckpointReader)(source)
    config = read_config(source, trust_remote_code)
    return ready(
        empty_model(config, reader.entries, source, trust_remote_code=trust_remote_code, **options),
        fmt,
        reader,
    )


def gguf_of(source: Path) -> Path | None:
    """Return the GGUF file that is meant by a path, None if it means something else.

    Raises:
        ValueError: A directory has several.
    """
    if source.is_file() or source.suffix == ".gguf":
        return source
    files = sorted(source.glob("*.gguf")) if not (source / "config.json").is_file() else []
    if len(files) > 1:
        raise ValueError(f"{source} has {len(files)} GGUF files: name one of them.")
    return files[0] if files else None
