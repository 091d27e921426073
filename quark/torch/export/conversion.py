"""From one checkpoint format to another: the same codes and scales, or an error."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from quark.torch.export.api import ModelExporter
from quark.torch.export.checkpoint.files import check_vacant
from quark.torch.export.checkpoint.writer import make_format
from quark.torch.export.formats.base import FORMATS
from quark.torch.export.gguf.writer import check_holds
from quark.torch.export.recognition import GGUF, gguf_of, open_checkpoint
from quark.torch.export.verification import Verdict
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.name_lookup import one_of

TARGETS = (*FORMATS, GGUF)
_BESIDE = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
_OF_WEIGHTS = ("config.json", ".index.json", "quantize_config.json", "quant_config.json")

logger = logging.getLogger(__name__)


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    overwrite: bool = False,
    verify: bool = False,
    trust_remote_code: bool = False,
) -> Verdict | None:
    """Write a quantized checkpoint again in another format, with the codes and scales it has.

    Nothing is rounded anew: what the other format cannot hold is an error before tensors are read.
    Only scales of GGUF are float16 whatever they were.

    Args:
        source: Directory of a checkpoint of any method that is read here, or a GGUF file.
        target: Directory to write.
        to: Format: quark, awq, gptq, compressed-tensors, fp8 or gguf.
        overwrite: Whether an existing directory may be replaced.
        verify: Whether the result is opened again and compared before it takes its place.
        trust_remote_code: Passed to Transformers.

    Returns:
        What came of opening it, None if it was not asked for.

    Raises:
        FileExistsError: The target is in use.
        FileNotFoundError: Files of the source are missing.
        ValueError: The source is damaged, or the format unknown or unable to hold it.
    """
    source, target = Path(source), Path(target)
    one_of(to, TARGETS, "to")
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"{target} holds the checkpoint itself: choose another directory.")
    if to == GGUF and gguf_of(source):
        raise ValueError(f"{source} is GGUF already.")
    check_vacant(target, overwrite)
    loading = open_checkpoint(source, trust_remote_code)
    if to == GGUF:
        check_holds(loading.model)
    else:
        make_format(loading.model, None, JsonExporterConfig(), to)
    model = loading.fill()
    exporter = ModelExporter(None, target, overwrite, verify=verify)
    if to == GGUF:
        exporter.export_gguf_model(model, source, "model")
    else:
        tokenizer = _tokenizer_of(source) if gguf_of(source) else Beside(source)
        exporter.export_safetensors_model(model, custom_mode=to, tokenizer=tokenizer)
    return exporter.verdict


class Beside:
    """The small files of a checkpoint that say nothing of its weights: tokenizer, code, template.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save_pretrained(self, directory: str | Path) -> None:
        """Copy them as they are; what is there already stays."""
        for file in sorted(self.directory.iterdir()):
            is_other = file.is_file() and file.suffix in _BESIDE
            place = Path(directory) / file.name
            if is_other and not file.name.endswith(_OF_WEIGHTS) and not place.exists():
                shutil.copyfile(file, place)


def _tokenizer_of(source: Path) -> Any:
    """Return the tokenizer of a GGUF file; None, with a warning, if Transformers cannot make it."""
    from transformers import AutoTokenizer

    file = gguf_of(source)
    assert file is not None
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # anything that a tokenizer of another family can raise
        logger.warning("%s: no tokenizer could be made of it (%s): none is written.", file, error)
        return None
