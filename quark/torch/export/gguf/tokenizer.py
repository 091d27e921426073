"""The tokenizer in the header of a GGUF file: vocabulary, merges or scores, special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quark.torch.export.gguf.reader import STRING, GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types of llama.cpp
LAST_SCORE = -1e6  # of tokens that no merge produces
TOKENS, KINDS, SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))

# Regular expression of the pre-tokenizer -> its name in llama.cpp.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_PRE_TOKENIZERS = {
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_CASES}*{_LOWER}+|{_CASES}+{_LOWER}*|\p{{N}}|"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1): "tekken",
}


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer of a directory, or that of a GGUF file.

    Raises:
        ValueError: Transformers does not load one.
    """
    from transformers import AutoTokenizer

    path = Path(path)
    place, source = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, **source)
    except Exception as error:  # anything that a tokenizer of another family can raise
        raise ValueError(f"{path} has no tokenizer that Transformers loads ({error}).") from error


def copy_tokens(writer: Any, path: str | Path, size: int) -> None:
    """Copy the tokenizer of another GGUF file, with all that its header says of it.

    Args:
        writer: A GGUFWriter.
        path: The other file.
        size: Vocabulary size of the model. A smaller tokenizer is padded with unused tokens.

    Raises:
        ValueError: The file has no tokens, or more than the model; or it is damaged.
    """
    from gguf import GGUFValueType

    entries = GgufFile(path).read_entries("tokenizer.")
    if TOKENS not in entries or entries[TOKENS].inner != STRING or not entries[TOKENS].value:
        raise ValueError(f"{path} has no tokens: give a tokenizer_path that has.")
    count = len(entries[TOKENS].value)
    _check_size(count, size)
    unused = size - count
    paddings = {TOKENS: _padding(count, size), KINDS: [UNUSED] * unused}
    paddings[SCORES] = [LAST_SCORE] * unused
    for key, (kind, inner, value) in entries.items():
        if inner is not None and not value:
            continue  # GGUFWriter has no empty arrays
        if key in paddings:
            if inner is None or len(value) != count:
                raise ValueError(f"{path} is damaged: {key} is not an array for {count} tokens.")
            value = value + paddings[key]
        sub_type = None if inner is None else GGUFValueType(inner)
        writer.add_key_value(key, value, GGUFValueType(kind), sub_type)


def _check_size(count: int, size: int) -> None:
    """Check that a model has all tokens of a tokenizer."""
    if count > size:
        raise ValueError(
            f"The tokenizer has tokens up to {count - 1}, the model only {size}: is "
            "tokenizer_path that of this model?"
        )


def _padding(begin: int, end: int) -> list[str]:
    """Return the names of tokens that the tokenizer lacks, by their numbers."""
    return [f"[PAD{i}]" for i in range(begin, end)]


def add_tokens(writer: Any, tokenizer: Any, size: int) -> None:
    """Add the vocabulary, its merges or scores, and the special tokens.

    Args:
        writer: A GGUFWriter.
        tokenizer: A fast tokenizer of Transformers.
        size: Vocabulary size of the model. A smaller tokenizer is padded with unused tokens.

    Raises:
        ValueError: The tokenizer has more tokens, or its kind has no name in GGUF.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"GGUF export needs a fast tokenizer, got {type(tokenizer).__name__}: give a directory "
            "with tokenizer.json or tokenizer.model."
        )
    definition = json.loads(backend.to_str())  # the content of tokenizer.json
    vocabulary = tokenizer.get_vocab()
    _check_size(max(vocabulary.values()) + 1, size)
    names = _padding(0, size)
    kinds = [UNUSED] * size
    model = definition["model"]
    for token, i in vocabulary.items():
        names[i], kinds[i] = token, NORMAL
        if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            kinds[i] = BYTE
    for added in definition["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if model.get("unk_token") in vocabulary:
        kinds[vocabulary[model["unk_token"]]] = UNKNOWN
    _add_model(writer, definition, names)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    _add_special(writer, tokenizer)


def _add_model(writer: Any, definition: dict[str, Any], names: list[str]) -> None:
    model = definition["model"]
    if model["type"] != "BPE":
        raise ValueError(f"GGUF export knows BPE tokenizers, not {model['type']}.")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        # SentencePiece merges the pair with the highest score first: merge i gets the score -i.
        scores = {"".join(pair): float(-i) for i, pair in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([scores.get(name, LAST_SCORE) for name in names])
        writer.add_add_space_prefix(_adds_space_prefix(definition))
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer_name(definition.get("pre_tokenizer")))
    writer.add_token_merges([" ".join(pair) for pair in merges])


def _flatten_sequence(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the members of a Sequence of normalizers or pre-tokenizers, or a single component."""
    if component is None:
        return []
    return list(component.get("pretokenizers") or component.get("normalizers") or [component])


def _adds_space_prefix(definition: dict[str, Any]) -> bool:
    """Whether the tokenizer puts a space before the text."""
    normalizers = _flatten_sequence(definition.get("normalizer"))
    pre_tokenizers = _flatten_sequence(definition.get("pre_tokenizer"))
    prepends = any(step["type"] == "Prepend" for step in normalizers)
    spaces = [step for step in pre_tokenizers if step["type"] == "Metaspace"]
    return prepends or any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _pre_tokenizer_name(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the name in llama.cpp of a pre-tokenizer, which splits text before merges."""
    steps = _flatten_sequence(pre_tokenizer)
    splits = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    if len(splits) == 1 and splits[0] in _PRE_TOKENIZERS:
        return _PRE_TOKENIZERS[splits[0]]
    if [(step["type"], step.get("use_regex", True)) for step in steps] == [("ByteLevel", True)]:
        return "gpt-2"
    raise ValueError(
        f"GGUF export does not know the name in llama.cpp of the pre-tokenizer {steps}: known are "
        f"those of GPT-2 and {', '.join(_PRE_TOKENIZERS.values())}, and SentencePiece models."
    )


def _add_special(writer: Any, tokenizer: Any) -> None:
    ids = tokenizer("a")["input_ids"]
    for name in ("bos", "eos", "unk", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id", None)
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    writer.add_add_bos_token(first is not None and ids[0] == first)
    writer.add_add_eos_token(last is not None and ids[-1] == last)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
