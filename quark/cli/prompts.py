"""The flags of the text that models continue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from quark.cli.console import wrong
from quark.cli.options import panel

if TYPE_CHECKING:
    import torch

    from quark.torch.report.continuation import Prompt

PROMPT_TOKENS = 24  # of the evaluation text, if there is no prompt
NEW_TOKENS = 32

_answers = panel("Continuation")
PromptText = Annotated[
    str | None,
    _answers(
        "--prompt", metavar="TEXT", help="Text to continue (default: from the evaluation text)."
    ),
]
NewTokens = Annotated[
    int,
    _answers(
        "--new_tokens",
        metavar="N",
        min=0,
        help="Maximum length of a continuation (0 = none).",
    ),
]


def check_prompt(prompt: str | None) -> None:
    """Check the text of ``--prompt``.

    Raises:
        typer.BadParameter: It is empty.
    """
    if prompt is not None and not prompt.strip():
        raise wrong("--prompt", "it is empty. Leave it out, or give a text to continue.")


def read_prompt(
    prompt: str | None,
    new_tokens: int,
    tokenizer: Any,
    windows: torch.Tensor,
    chat_template: bool = False,
) -> Prompt | None:
    """Return the text to continue; None if no continuation is wanted.

    Args:
        prompt: The text; None for the beginning of the windows.
        new_tokens: Largest length of a continuation, 0 for none.
        tokenizer: Tokenizer of the models.
        windows: Token identifiers, (windows, length).
        chat_template: Whether the text is the message of a chat.

    Raises:
        typer.BadParameter: There is no chat template.
    """
    import torch

    from quark.torch.report.continuation import Prompt

    if not new_tokens:
        return None
    if prompt is None:
        return Prompt(windows[:1, :PROMPT_TOKENS], tokenizer, new_tokens)
    if chat_template:
        messages = [{"role": "user", "content": prompt}]
        try:
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except ValueError as error:
            raise wrong("--apply_chat_template", str(error)) from None
    else:
        tokens = tokenizer(prompt)["input_ids"]
    return Prompt(torch.tensor([tokens]), tokenizer, new_tokens)
