"""What to type where a path holds no model."""

from __future__ import annotations

import re
from pathlib import Path

_DOWNLOAD = "download one with 'hf download OWNER/NAME --local-dir DIRECTORY'"
_HUB = re.compile(r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # folder of the cache of the Hub


def without_place(given: Path) -> str:
    """Return a sentence for a path that does not exist: what it seems to be, and what to type."""
    text = given.as_posix()
    if (address := _HUB.fullmatch(text)) is not None:
        return f"a name is expected, not an address. Give {address[1]}"
    if text.startswith("~/"):
        return f"there is no directory {given}: '~' was not replaced. Write $HOME{text[1:]}"
    start = f"there is no directory {given} and no GGUF file of that name."
    if near := near_path(given):
        return f"{start} Did you mean {near!r}?"
    return f"{start} Give the directory of a model; {_DOWNLOAD}."


def near_path(given: Path) -> str:
    """Return the model or directory beside a path with the most similar name, "" without any."""
    from quark.torch.quantization.config.name_lookup import nearest

    if not given.parent.is_dir():
        return ""
    names = [p.name for p in given.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"]
    near = nearest(given.name.strip("\"' "), names, count=1)
    return (given.parent / near[0]).as_posix() if near else ""


def without_config(directory: Path) -> str:
    """Return a sentence for a directory without ``config.json``: what it holds, what to type."""
    start = f"{directory} has no config.json."
    if (directory / "adapter_config.json").is_file():
        return (
            f"{start} It holds an adapter (LoRA), not a model. Merge it into its model first, in "
            f"Python: AutoPeftModelForCausalLM.from_pretrained({str(directory)!r})"
            ".merge_and_unload().save_pretrained('MERGED')"
        )
    if (directory / "model_index.json").is_file():
        kind = "It is a pipeline of diffusers. docs/other-models.md quantizes it in Python."
        return f"{start} {kind}"
    if inner := _inner_models(directory):
        cached = _CACHED.fullmatch(directory.resolve().name)
        name = f", or the name {cached[1]}/{cached[2]}" if cached else ""
        return f"{start} Give the directory of the model: {inner[-1]}{name}"
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.bin")):
        return f"{start} Copy it from the original model to this directory, with its tokenizer."
    return f"{start} The directory of a model has one; {_DOWNLOAD}."


def _inner_models(directory: Path) -> list[Path]:
    """Return the directories of models in a directory, also of the cache of the Hub."""
    found = [*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json")]
    return [path.parent for path in sorted(found)]
