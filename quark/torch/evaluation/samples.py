"""Calibration batches of images, audio and messages, made by the processor of a model.

=============================  =====================================================================
source                         samples
=============================  =====================================================================
directory with images          each image, with a short request where the model reads text too
directory with audio           each sound, the same way
``.jsonl`` of messages         each line: a list of messages, or an object with ``messages``
=============================  =====================================================================

A message is ``{"role": "user", "content": …}``. Content is a text, or a list of parts:
``{"type": "text", "text": …}``, ``{"type": "image", "image": FILE}`` and
``{"type": "audio", "audio": FILE}``. Names of files are relative to the ``.jsonl`` file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from quark.torch.evaluation.chats import render_chat
from quark.torch.evaluation.media import AUDIO, IMAGES, media_files, read_audio, read_image

Kind = Literal["images", "audio", "messages"]
REQUEST = {"image": "Describe the image.", "audio": "Describe what you hear."}
ANSWER_TOKENS = 32  # that an encoder-decoder generates for a sample without text
_SAVED_DATASET = ("state.json", "dataset_dict.json")
_FILES = {"image": ("image", "path", "url"), "audio": ("audio", "path", "url")}


class Sample(NamedTuple):
    """The inputs of a processor for one batch.

    Attributes:
        messages: A conversation with files left out of its parts; None for media alone.
        images: Files of its images.
        sounds: Files of its sounds.
    """

    messages: list[dict[str, Any]] | None
    images: list[Path]
    sounds: list[Path]


def kind_of_source(source: str | Path) -> Kind | None:
    """Return the kind of the samples in a file or directory; None for text, or if it is missing.

    Raises:
        ValueError: A directory has both images and audio.
    """
    path = Path(source)
    if path.is_dir() and not any((path / name).is_file() for name in _SAVED_DATASET):
        images, sounds = (bool(media_files(path, suffixes)) for suffixes in (IMAGES, AUDIO))
        if images and sounds:
            raise ValueError(
                f"{path} has images and audio: give a directory of one kind, or a .jsonl of "
                "messages that name the files"
            )
        return "images" if images else "audio" if sounds else None
    if path.suffix.lower() == ".jsonl" and path.is_file():
        first = next(_lines(path), None)
        return "messages" if first is not None and _messages(first[1]) is not None else None
    return None


def read_samples(source: str | Path, limit: int | None = None) -> list[Sample]:
    """Return the samples of a source that ``kind_of_source`` knows; media are not opened.

    Args:
        source: Directory or file.
        limit: Maximum number of samples.

    Raises:
        ValueError: A line is no conversation.
    """
    path, kind = Path(source), kind_of_source(source)
    if kind == "messages":
        samples = [_conversation(path, number, line) for number, line in _lines(path)]
    elif kind == "images":
        samples = [Sample(None, [file], []) for file in media_files(path, IMAGES)]
    else:
        samples = [Sample(None, [], [file]) for file in media_files(path, AUDIO)]
    return samples[:limit]


def read_conversations(source: str | Path, tokenizer: Any) -> list[str]:
    """Return the conversations of a ``.jsonl`` of messages as texts, by the chat template.

    Args:
        source: The file.
        tokenizer: Tokenizer of a model that reads text.

    Raises:
        ValueError: A line is no conversation or names images or audio, or there is no template.
    """
    check_template(tokenizer)
    samples = read_samples(source)
    if any(sample.images or sample.sounds for sample in samples):
        raise ValueError(
            f"{source} names images or audio: only 'quark quantize' reads these, as --dataset, "
            "for a model that takes them"
        )
    return [render_chat(tokenizer, sample.messages or []) for sample in samples]


def check_template(reader: Any) -> str:
    """Return the chat template of a tokenizer or processor.

    Raises:
        ValueError: It has none.
    """
    template: str | None = _template(reader)
    if template is None:
        raise ValueError(
            f"the model has no chat template, which messages need ({type(reader).__name__}). Give "
            "texts, images or audio, or add a file chat_template.jinja to the directory of the "
            "model"
        )
    return template


def _template(reader: Any) -> Any:
    """Return the chat template of a tokenizer, of a processor or of its tokenizer, or None."""
    own = getattr(reader, "chat_template", None)
    return own or getattr(getattr(reader, "tokenizer", None), "chat_template", None)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Iterate over the numbers and values of the lines of a ``.jsonl`` file, without blank ones."""
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no .jsonl file in UTF-8: {error}") from None


def _messages(record: Any) -> list[Any] | None:
    messages = record.get("messages") if isinstance(record, Mapping) else record
    return messages if isinstance(messages, list) and messages else None


def _conversation(path: Path, number: int, record: Any) -> Sample:
    """Return the sample of a line."""
    sample = Sample([], [], [])
    assert sample.messages is not None
    for message in _messages(record) or [None]:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            sample.messages.append(dict(message))
            continue
        if not isinstance(content, list) or not all(isinstance(p, Mapping) for p in content):
            raise ValueError(
                f"{path}, line {number}: expected messages with a role and content, a text or a "
                f"list of parts, got {str(message)[:80]!r}"
            )
        try:
            parts = [_part(part, path.parent, sample) for part in content]
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        sample.messages.append({**message, "content": parts})
    return sample


def _part(part: Mapping[str, Any], directory: Path, sample: Sample) -> dict[str, Any]:
    """Return a part for a chat template; the file of an image or sound goes to the sample."""
    kind = str(part.get("type", "text")).removesuffix("_url")
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in _FILES:
        raise ValueError(f"expected a part of type text, image or audio, got {str(part)[:80]!r}")
    name = part.get(f"{kind}_url") or next((part[key] for key in _FILES[kind] if key in part), None)
    name = name.get("url") if isinstance(name, Mapping) else name
    if not isinstance(name, str) or "://" in name or name.startswith("data:"):
        raise ValueError(f"expected the file of an {kind} on this machine, got {str(name)[:80]!r}")
    (sample.images if kind == "image" else sample.sounds).append(directory / name)
    return {"type": kind}


def make_batches(
    samples: Iterable[Sample], processor: Any, length: int | None = None
) -> list[dict[str, Any]]:
    """Return one batch for each sample, the arguments of a model as a mapping.

    Args:
        samples: The samples.
        processor: Processor, image processor, feature extractor or tokenizer of the model.
        length: Maximum number of tokens of a sample without media.

    Raises:
        FileNotFoundError: A file does not exist.
        ImportError: A package that reads the files is missing.
        ValueError: A file cannot be read, or the processor does not take the samples.
    """
    return [_batch(sample, processor, length) for sample in samples]


def _batch(sample: Sample, processor: Any, length: int | None) -> dict[str, Any]:
    """Return the batch of one sample."""
    images = [read_image(path) for path in sample.images]
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    if sample.sounds and rate is None:
        raise ValueError(f"{type(processor).__name__} takes no audio, such as {sample.sounds[0]}")
    sounds = [read_audio(path, int(rate)).numpy() for path in sample.sounds if rate]
    arguments: dict[str, Any] = {"images": images} if images else {}
    if sounds:
        arguments |= {_audio_name(processor): sounds, "sampling_rate": rate}
    text = _text(sample, processor)
    if text is not None:
        arguments["text"] = text
    if length is not None and not (images or sounds):
        arguments |= {"truncation": True, "max_length": length}
    if images and not hasattr(processor, "image_processor") and "image" not in _kind(processor):
        raise ValueError(f"{type(processor).__name__} takes no images, such as {sample.images[0]}")
    try:
        made = processor(**arguments, return_tensors="pt")
    except (AttributeError, ImportError, KeyError, IndexError, TypeError, ValueError) as error:
        what = next(iter([*sample.images, *sample.sounds]), "the messages")
        raise ValueError(f"{type(processor).__name__} does not take {what}: {error}") from error
    return {name: value for name, value in made.items() if value is not None}


def _kind(processor: Any) -> str:
    """Return the input that a processor of one modality is for, such as ``pixel_values_image``."""
    first = next(iter(getattr(processor, "model_input_names", [""])))
    return "image" if first.startswith("pixel_") else str(first)


def _audio_name(processor: Any) -> str:
    """Return the argument that takes sounds: processors and feature extractors differ."""
    names = inspect.signature(processor.__call__).parameters
    return next((name for name in ("audio", "raw_speech", "audios") if name in names), "audio")


def _text(sample: Sample, processor: Any) -> str | None:
    """Return the text of a sample as the chat template has it; None if there is no tokenizer.

    Raises:
        ValueError: There are messages and no chat template.
    """
    tokenizer = getattr(processor, "tokenizer", None)
    template = _template(processor)
    kinds = ["image"] * len(sample.images) + ["audio"] * len(sample.sounds)
    messages = sample.messages
    if messages is None and template is not None:
        parts = [{"type": kind} for kind in kinds]
        request = {"type": "text", "text": REQUEST[kinds[0]]}
        messages = [{"role": "user", "content": [*parts, request]}]
    if messages is not None:
        check_template(processor)
        if hasattr(processor, "apply_chat_template"):
            return str(processor.apply_chat_template(messages, tokenize=False))
    if tokenizer is None or "image" not in kinds:
        return None
    return f"{getattr(processor, 'image_token', '')}\n{REQUEST['image']}".lstrip()


@torch.no_grad()
def complete_batches(model: nn.Module, batches: Iterable[Any]) -> list[Any]:
    """Return batches as a model takes them: floats of its type, and tokens for a decoder.

    An encoder-decoder that is given no tokens for its decoder reads the text of the batch there;
    for images and audio it reads what it generates.

    Args:
        model: The model.
        batches: Tensors of token ids, or mappings of arguments.
    """
    config: Any = getattr(model, "config", None)
    known = inspect.signature(model.forward).parameters
    decodes = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in known
    completed = []
    for given in batches:
        batch = {"input_ids": given} if isinstance(given, torch.Tensor) and decodes else given
        if isinstance(batch, Mapping):
            batch = {name: _as_parameters(value, model) for name, value in batch.items()}
            if decodes and not {"decoder_input_ids", "labels"} & set(batch):
                batch["decoder_input_ids"] = _decoder_tokens(model, batch)
        completed.append(batch)
    return completed


def _as_parameters(value: Any, model: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(model.dtype) if is_float and hasattr(model, "dtype") else value


def _decoder_tokens(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    if "input_ids" in batch:
        return torch.as_tensor(batch["input_ids"])
    on_device = {n: v.to(model.device) for n, v in batch.items() if isinstance(v, torch.Tensor)}
    tokens: torch.Tensor = model.generate(
        **on_device, max_new_tokens=ANSWER_TOKENS, do_sample=False
    )
    return tokens.cpu()
