"""Token tables of a GGUF file, from the tokenizer of Transformers."""

from __future__ import annotations

import json
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
LAST_SCORE = -1e6  # of tokens that no merge makes

# Expression that cuts text before merges -> name of it in llama.cpp.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_CUTS = {
    rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
    rf"{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_CASES}*{_LOWER}+|{_CASES}+{_LOWER}*|\p{{N}}|"
    + _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1): "tekken",
}


def add_tokens(writer: Any, tokenizer: Any, size: int) -> None:
    """Add the vocabulary, its merges or scores, and the special tokens.

    Args:
        writer: A GGUFWriter.
        tokenizer: A fast tokenizer of Transformers.
        size: Tokens the model knows; what the tokenizer lacks is filled up.

    Raises:
        ValueError: The tokenizer has more tokens, or is of a kind that GGUF has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"GGUF export needs a fast tokenizer, got {type(tokenizer).__name__}: give a directory "
            "with tokenizer.json or tokenizer.model."
        )
    described = json.loads(backend.to_str())
    vocabulary = tokenizer.get_vocab()
    if max(vocabulary.values()) >= size:
        raise ValueError(
            f"The tokenizer has tokens up to {max(vocabulary.values())}, the model only {size}: "
            "is tokenizer_path the directory of this model?"
        )
    names = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    model = described["model"]
    for token, i in vocabulary.items():
        names[i], kinds[i] = token, NORMAL
        if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            kinds[i] = BYTE
    for added in described["added_tokens"]:
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if model.get("unk_token") in vocabulary:
        kinds[vocabulary[model["unk_token"]]] = UNKNOWN
    _add_model(writer, described, names)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    _add_special(writer, tokenizer)


def _add_model(writer: Any, described: dict[str, Any], names: list[str]) -> None:
    model = described["model"]
    if model["type"] != "BPE":
        raise ValueError(f"GGUF export knows BPE tokenizers, not {model['type']}.")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        # As in SentencePiece: what is merged first has the highest score.
        rank = {"".join(pair): float(-i) for i, pair in reversed([*enumerate(merges)])}
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([rank.get(name, LAST_SCORE) for name in names])
        writer.add_add_space_prefix(_prepends(described))
        return
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_cut(described.get("pre_tokenizer")))
    writer.add_token_merges([" ".join(pair) for pair in merges])


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the members of a sequence, or the part alone."""
    if part is None:
        return []
    return list(part.get("pretokenizers") or part.get("normalizers") or [part])


def _prepends(described: dict[str, Any]) -> bool:
    """Whether a space is put before the text."""
    before = any(step["type"] == "Prepend" for step in _steps(described.get("normalizer")))
    spaces = [s for s in _steps(described.get("pre_tokenizer")) if s["type"] == "Metaspace"]
    return before or any(step.get("prepend_scheme", "always") != "never" for step in spaces)


def _cut(part: dict[str, Any] | None) -> str:
    """Return the name in llama.cpp of how text is cut before merges."""
    steps = _steps(part)
    splits = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    if len(splits) == 1 and splits[0] in _CUTS:
        return _CUTS[splits[0]]
    if [(step["type"], step.get("use_regex", True)) for step in steps] == [("ByteLevel", True)]:
        return "gpt-2"
    raise ValueError(
        f"GGUF export does not know how llama.cpp calls the pre-tokenizer {steps}: known are those "
        f"of GPT-2 and {', '.join(_CUTS.values())}, and SentencePiece models."
    )


def _add_special(writer: Any, tokenizer: Any) -> None:
    ids = tokenizer("a")["input_ids"]
    for name in ("bos", "eos", "unk", "pad"):
        found = getattr(tokenizer, f"{name}_token_id", None)
        if found is not None:
            getattr(writer, f"add_{name}_token_id")(found)
    first, last = tokenizer.bos_token_id, tokenizer.eos_token_id
    writer.add_add_bos_token(first is not None and ids[0] == first)
    writer.add_add_eos_token(last is not None and ids[-1] == last)
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str):
        writer.add_chat_template(template)
