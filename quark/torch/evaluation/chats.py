"""Conversations as text, by the chat template of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

Messages = Sequence[Mapping[str, Any]]
RenderChat = Callable[[Messages], str]


def join_messages(messages: Messages) -> str:
    """Return the contents of messages, separated by blank lines."""
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def renderer_of(tokenizer: Any) -> RenderChat:
    """Return the function that makes text of messages: the template, or ``join_messages``."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    return partial(render_chat, tokenizer) if has_template else join_messages


def render_chat(tokenizer: Any, messages: Messages) -> str:
    """Return messages as the chat template writes them, without the marks around a document.

    Windows of tokens put these marks around each document again.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: Mappings with ``role`` and ``content``, a text or a list of parts.

    Raises:
        ValueError: The template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        text = str(tokenizer.apply_chat_template([*messages], tokenize=False))
    except TemplateError as error:
        raise ValueError(f"the chat template of the model refuses messages: {error}") from None
    first, last = (str(getattr(tokenizer, name, None) or "") for name in ("bos_token", "eos_token"))
    return text.removeprefix(first).removesuffix(last)
